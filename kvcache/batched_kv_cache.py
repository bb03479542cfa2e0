"""What the model sees of the batch's KV in one layer."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_dp.kvcache.guest_chunk import GuestChunk
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.slab_step import SlabStep


class NotSplittableError(Exception):
    """The model does its own arithmetic on cached KV, so its batch must stay one rectangle."""


class StepStore(Protocol):
    """The batch behind the caches of all layers."""

    @property
    def steps(self) -> Sequence[SlabStep]: ...

    @property
    def guests(self) -> Sequence[GuestChunk]: ...

    def write(self, layer: int, new: LayerKV) -> list[LayerKV]: ...

    def ask_window(self, window: int | None, num_tokens: int) -> None: ...


class BatchedKVCache:
    """One layer's view of the batch, in mlx-lm's cache protocol, for single-token steps.

    With one slab, ``update_and_fetch`` returns the slab's keys and values, and any arithmetic on
    them is right. With several, or with guests, they do not form one array: it returns the new
    tokens' own keys and values, and ``attend``, called by the shared attention function, finds
    the rest.
    """

    def __init__(
        self, store: StepStore, layer: int, *, window: int | None, grouped_mask: bool
    ) -> None:
        self._store = store
        self._layer = layer
        self._window = window
        self._grouped_mask = grouped_mask
        self._split = False
        self._attended = False
        self._fetched: LayerKV | None = None
        self._parts: list[LayerKV] = []
        self.offset: mx.array = mx.zeros((0,), dtype=mx.int32)
        # Some models hang other work on these. They are what was fetched, and nothing reads back
        # what a model puts here.
        self.keys: Any = None
        self.values: Any = None

    @property
    def split(self) -> bool:
        return self._split

    def begin_step(self, offset: mx.array, *, split: bool) -> None:
        """``offset`` [rows] is each row's position of the coming token."""
        self.offset = offset
        self._split = split
        self._attended = False

    def end_step(self) -> list[mx.array]:
        """Forget the step's views, since one that lives on makes the next write a copy.

        Returns what was written and not attended to: nothing else would ever compute it.
        """
        fetched, self._fetched = self._fetched, None
        self.keys = self.values = None
        self._parts = []
        if fetched is None or self._attended:
            return []
        if self._split:
            raise NotSplittableError("the model does not use the shared attention function")
        return list(fetched)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, KV heads, 1, head dim] and return what attention may see."""
        assert keys.shape[2] == 1, keys.shape
        self._parts = self._store.write(self._layer, LayerKV(keys, values))
        self._fetched = LayerKV(keys, values) if self._split else self._parts[0]
        self.keys, self.values = self._fetched
        return self._fetched

    def attended(self) -> None:
        """The shared attention function has looked at what was fetched."""
        self._attended = True

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the step's ``update_and_fetch`` returned, for layers that share it."""
        assert self._fetched is not None, f"layer {self._layer} has written nothing yet"
        return self._fetched

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return None, or booleans, true where a row may look.

        They are [rows, 1, 1, visible], with one axis more for models that group their heads.
        """
        assert N == 1, N
        # A cache that keeps no more than the window needs no mask for it.
        narrow = window_size is not None and (self._window is None or window_size < self._window)
        if window_size is not None:
            self._store.ask_window(self._window, window_size)
        if self._split:
            if return_array or narrow:
                raise NotSplittableError("the model makes its own masks")
            return None
        step = self._store.steps[0]
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
        """Attend slab by slab, the guests last.

        ``fetched`` must be what ``update_and_fetch`` returned.
        """
        if self._fetched is None or fetched.keys is not self._fetched.keys:
            raise NotSplittableError("the model changes keys after it cached them")
        if fetched.values is not self._fetched.values:
            raise NotSplittableError("the model changes values after it cached them")
        steps, guests = self._store.steps, self._store.guests
        attended = [
            mx.fast.scaled_dot_product_attention(
                queries[step.start : step.end],
                part.keys,
                part.values,
                scale=scale,
                mask=step.place(self._window).mask,
                sinks=sinks,
            )
            for step, part in zip(steps, self._parts, strict=not guests)
        ]
        start = steps[-1].end if steps else 0
        for guest, part in zip(guests, self._parts[len(steps) :], strict=True):
            rows = queries[start : start + guest.num_tokens]
            mask = guest.mask(self._window)
            attended.append(guest.attend(rows, part, scale=scale, mask=mask, sinks=sinks))
            start += guest.num_tokens
        return attended[0] if len(attended) == 1 else mx.concatenate(attended)
