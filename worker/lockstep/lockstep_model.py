"""A model whose forward passes run on all ranks of its group together."""

from typing import Any

import mlx.core as mx

from mlx_dp.worker.contract.failure import is_model_fault
from mlx_dp.worker.lockstep.lockstep import Lockstep


class LockstepModel:
    """Replaces the model in the engine. Calls run in lockstep; attributes are the model's."""

    def __init__(self, model: Any, lockstep: Lockstep) -> None:
        self._model = model
        self._lockstep = lockstep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        """Run the model as a pass; returns when all its collectives are launched.

        Only logits of single tokens are read, never those of a chunk: if the head is divided, a
        chunk has none.
        """
        self._lockstep.begin(tokens.size, tokens.size if tokens.shape[-1] == 1 else 0)
        try:
            logits: mx.array = self._model(tokens, cache=cache)
        except Exception as error:
            # The peers wait for the rest of the pass. After any other error nothing can be
            # launched.
            if is_model_fault(error):
                self._lockstep.abandon()
            raise
        self._lockstep.end()
        return logits
