"""One layer of the batch's KV, as the model sees it."""

from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.batch.kv_step import KVStep
from mlx_dp.kvcache.batch.padded_step import PaddedStep
from mlx_dp.kvcache.kv_row import LayerKV


class NotSplittableError(Exception):
    """The model does its own arithmetic on cached KV, so its batch must stay one array."""


class BatchedKVCache:
    """One layer of the batch in mlx-lm's cache protocol.

    In a single slab, ``update_and_fetch`` returns the slab's keys and values, and any arithmetic
    on them is right. Several slabs, tails and chunks of prompts do not form one array. Then it
    returns only the new tokens' keys and values; the shared attention function calls ``attend``,
    which uses the other tokens too.
    """

    def __init__(self, layer: int, *, window: int | None, grouped_mask: bool) -> None:
        self._layer = layer
        self._window = window
        self._grouped_mask = grouped_mask
        self._step: KVStep | PaddedStep | None = None
        self._attended = False
        self._fetched: LayerKV | None = None
        self._parts: list[tuple[LayerKV, ...]] = []
        self.offset: mx.array = mx.zeros((0,), dtype=mx.int32)
        self.asks_wide = False
        # The fetched arrays: some models make other work depend on them. Values that a model
        # stores here are never read.
        self.keys: Any = None
        self.values: Any = None

    @property
    def step(self) -> KVStep | PaddedStep:
        assert self._step is not None, "no step is under way"
        return self._step

    @property
    def split(self) -> bool:
        return self.step.split

    def begin_step(self, step: KVStep | PaddedStep, offset: mx.array) -> None:
        """``offset`` [rows] is the position of each row's next token."""
        self.offset = offset
        self._step = step
        self._attended = False

    def end_step(self) -> list[mx.array]:
        """Release the step: its views would turn the next write into a copy, and the requests of
        its chunks may be gone by then.

        Returns arrays that were written but not attended to: nothing else would compute them.
        """
        fetched, self._fetched = self._fetched, None
        split, self._step = self.split, None
        self.keys = self.values = None
        self._parts = []
        if fetched is None or self._attended:
            return []
        if split:
            raise NotSplittableError("the model does not use the shared attention function")
        return list(fetched)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, KV heads, width, head dim] and return the KV that attention may see."""
        assert keys.shape[2] == self.step.width, (keys.shape, self.step.width)
        self._parts = self.step.write(self._layer, self._window, LayerKV(keys, values))
        self._fetched = LayerKV(keys, values) if self.split else self._parts[0][0]
        self.keys, self.values = self._fetched
        return self._fetched

    def attended(self) -> None:
        """Note that the shared attention function has used the fetched arrays."""
        self._attended = True

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the result of the step's ``update_and_fetch``, for layers that share it."""
        assert self._fetched is not None, f"layer {self._layer} has written nothing yet"
        return self._fetched

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return None, or booleans that are true for the tokens that a row may see.

        They are [rows, 1, 1, visible], with one axis more for models that group their heads.
        """
        assert self.step.width == N, (N, self.step.width)
        # A cache that keeps no more than the window needs no mask for it.
        narrow = window_size is not None and (self._window is None or window_size < self._window)
        if window_size is not None:
            self.asks_wide |= self._window is not None and window_size > self._window
            self.step.ask_window(self._window, window_size)
        if self.split:
            if return_array or narrow:
                raise NotSplittableError("the model makes its own masks")
            return None
        step = self.step.slab_steps[0]
        place = step.place(self._window)
        mask = place.mask
        if narrow:
            assert window_size is not None, "only a window is narrow"
            mask = step.recent(self._window, window_size)
        if mask is None and return_array:
            mask = mx.ones((len(step.lengths), 1, 1, place.visible), dtype=mx.bool_)
        if mask is not None and self._grouped_mask:
            return mask[:, None]
        return mask

    def attend(
        self,
        queries: mx.array,
        fetched: LayerKV,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to all tokens that each row may see.

        ``fetched`` must be the result of ``update_and_fetch``.
        """
        if self._fetched is None or fetched.keys is not self._fetched.keys:
            raise NotSplittableError("the model changes keys after it cached them")
        if fetched.values is not self._fetched.values:
            raise NotSplittableError("the model changes values after it cached them")
        self._attended = True
        return self.step.attend(queries, self._parts, window=self._window, scale=scale, sinks=sinks)
