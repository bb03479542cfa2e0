"""mlx-lm's ``BatchGenerator`` in this process, as one side of a comparison."""

import gc
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from scripts.benchmarks.engine.side import Emitted


class PeerBatch:
    """As ``mlx_lm.server`` runs it: 32 requests at once, prompts in pieces of 2,048 tokens."""

    def __init__(self, model: Any) -> None:
        """Shares our ``model``.

        A second copy of the weights, at other addresses, was measured to be up to 7 %
        faster, on either side.
        """
        self._model = model
        self._generator: Any = BatchGenerator(self._model)
        self._running: set[int] = set()

    @property
    def name(self) -> str:
        return "mlx-lm"

    def submit(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        (request,) = self._generator.insert([list(prompt_ids)], [max_tokens])
        self._running.add(request)
        return int(request)

    def cancel(self, requests: Collection[int]) -> None:
        self._generator.remove(list(requests))
        self._running.difference_update(requests)

    def step(self) -> list[Emitted]:
        _, responses = self._generator.next()
        emitted = [
            Emitted(response.uid, response.token, response.finish_reason is not None)
            for response in responses
        ]
        self._running.difference_update(token.request for token in emitted if token.ended)
        return emitted

    def settle(self) -> None:
        mx.synchronize(self._generator.stream)

    def clear(self) -> None:
        self.cancel(tuple(self._running))
        self.settle()
        # A new one, since an empty one still holds the arrays of its last step.
        self._generator.close()
        self._generator = BatchGenerator(self._model)
        gc.collect()
        mx.clear_cache()
