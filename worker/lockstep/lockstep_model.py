"""A model whose every forward pass is one of all ranks of its group."""

from typing import Any

import mlx.core as mx

from mlx_dp.worker.contract.failure import says_of_model
from mlx_dp.worker.lockstep.lockstep import Lockstep


class LockstepModel:
    """Stands where the engine has the model. All that is not a call is the model's own."""

    def __init__(self, model: Any, lockstep: Lockstep) -> None:
        self._model = model
        self._lockstep = lockstep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        """Run the model as a pass; returns when all collectives of it are launched.

        The logits of a chunk are never read, only those of single tokens: where the head is
        divided, a chunk has none.
        """
        self._lockstep.begin(tokens.size, tokens.size if tokens.shape[-1] == 1 else 0)
        try:
            logits: mx.array = self._model(tokens, cache=cache)
        except Exception as error:
            # The peers wait for the rest of the pass; but for a broken one nothing can be launched.
            if says_of_model(error):
                self._lockstep.abandon()
            raise
        self._lockstep.end()
        return logits
