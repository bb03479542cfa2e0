"""Requests that decode together in our caches, each compared with a run alone."""

import mlx.core as mx
import numpy as np

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk
from mlx_dp.worker.loading.loaded_model import LoadedModel
from tests.support.batches.tiny_batches import Alone, prefilled


class Busy:
    """Decoding requests, each compared with the logits of a run alone."""

    def __init__(self, loaded: LoadedModel, form: BatchForm) -> None:
        self.loaded = loaded
        self.form = form
        self.caches = DecodeCaches(loaded, form)
        self.set_spare(0)
        self.alone: dict[int, Alone] = {}

    def set_spare(self, nbytes: int) -> None:
        self.spare = nbytes
        self.caches.set_spare(nbytes)

    def join(self, key: int, prompt: list[int], *, room: int = 40) -> None:
        self.join_prefilled(key, prefilled(self.loaded, prompt), prompt, room=room)

    def join_prefilled(self, key: int, prefill: Prefill, prompt: list[int], *, room: int) -> None:
        before, most = self.caches.nbytes, self.caches.row_nbytes(room)
        self.caches.join(key, prefill, room=room)
        self.expect_growth(before, most)
        self.alone[key] = Alone(self.loaded, prompt)

    def leave(self, key: int) -> None:
        self.caches.leave(key)
        del self.alone[key]

    def step(self, chunks: list[PromptChunk] | None = None) -> tuple[int, ...]:
        before, most = self.caches.nbytes, self.caches.growth_nbytes()
        order, logits = self.caches.forward(self.newest, chunks or [])
        assert sorted(order) == sorted(self.alone)
        self.caches.check()
        mx.eval(logits, self.caches.arrays())
        for row, key in enumerate(order):
            expected = self.alone[key].next_logits()
            atol = 1e-4 * float(np.abs(expected).max())
            np.testing.assert_allclose(np.array(logits[row]), expected, atol=atol, err_msg=str(key))
        self.expect_growth(before, most)
        return order

    def expect_growth(self, before: int, most: int) -> None:
        """Check that the announced bytes suffice.

        A state that gets longer is measured when its first token leaves it, and a single
        window holds a whole chunk until the next token.
        """
        if not self.form.single:
            assert self.caches.nbytes - before <= most + self.spare + 64

    def newest(self, keys: tuple[int, ...]) -> mx.array:
        return mx.array([self.alone[key].tokens[-1] for key in keys], dtype=mx.int32)
