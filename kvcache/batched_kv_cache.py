"""What the model sees of the batch's KV in one layer."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_dp.kvcache.guest_chunk import GuestChunk
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.kv_slab import SlabStep


class NotSplittableError(Exception):
    """The model does its own arithmetic on cached KV, so its batch must stay one rectangle."""


class StepStore(Protocol):
    """The batch behind the caches of all layers."""

    @property
    def steps(self) -> Sequence[SlabStep]: ...

    @property
    def guest(self) -> GuestChunk | None: ...

    def write(self, layer: int, new: LayerKV) -> list[LayerKV]: ...


class BatchedKVCache:
    """One layer's view of the batch, in mlx-lm's cache protocol, for single-token steps.

    With one slab, ``update_and_fetch`` returns the slab's keys and values, and any arithmetic on
    them is right. With several, or with a guest, they do not form one array: it returns the new
    tokens' own keys and values, and ``attend``, called by the shared attention function, finds
    the rest.
    """

    def __init__(self, store: StepStore, layer: int, *, grouped_mask: bool) -> None:
        self._store = store
        self._layer = layer
        self._grouped_mask = grouped_mask
        self._split = False
        self._fetched: LayerKV | None = None
        self._parts: list[LayerKV] = []
        self.offset: mx.array | int = mx.zeros((0,), dtype=mx.int32)

    @property
    def split(self) -> bool:
        return self._split

    def begin_step(self, offset: mx.array | int, *, split: bool) -> None:
        """``offset`` [rows] is each row's position of the coming token; a number for one row."""
        self.offset = offset
        self._split = split
        self._fetched = None

    def end_step(self) -> None:
        """Forget the step's views, since one that lives on makes the next write a copy."""
        pending = self._split and self._fetched is not None
        self._fetched = None
        self._parts = []
        if pending:
            raise NotSplittableError("the model does not use the shared attention function")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [rows, KV heads, 1, head dim] and return what attention may see."""
        assert keys.shape[2] == 1, keys.shape
        parts = self._store.write(self._layer, LayerKV(keys, values))
        if not self._split:
            return parts[0]
        self._parts = parts
        self._fetched = LayerKV(keys, values)
        return keys, values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return None, or booleans, true where a row may look.

        They are [rows, 1, 1, visible], with one axis more for models that group their heads.
        """
        assert N == 1, N
        if self._split:
            if return_array or window_size is not None:
                raise NotSplittableError("the model makes its own masks")
            return None
        step = self._store.steps[0]
        mask = step.mask
        if window_size is not None and step.visible > window_size:
            index = mx.arange(step.visible, dtype=mx.int32)
            offsets = mx.array(self.offset, dtype=mx.int32).reshape(-1, 1)
            inside = index > offsets - window_size
            mask = inside[:, None, None] if mask is None else mask & inside[:, None, None]
        if mask is None and return_array:
            mask = mx.ones((step.end - step.start, 1, 1, step.visible), dtype=mx.bool_)
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
        """Attend slab by slab, the guest last.

        ``fetched`` must be what ``update_and_fetch`` returned.
        """
        expected, self._fetched = self._fetched, None
        if expected is None or fetched.keys is not expected.keys:
            raise NotSplittableError("the model changes keys after it cached them")
        if fetched.values is not expected.values:
            raise NotSplittableError("the model changes values after it cached them")
        steps, guest = self._store.steps, self._store.guest
        attended = [
            mx.fast.scaled_dot_product_attention(
                queries[step.start : step.end],
                part.keys,
                part.values,
                scale=scale,
                mask=step.mask,
                sinks=sinks,
            )
            for step, part in zip(steps, self._parts, strict=guest is None)
        ]
        if guest is not None:
            rows = queries[steps[-1].end :]
            attended.append(guest.attend(rows, self._parts[-1], scale=scale, sinks=sinks))
        return mx.concatenate(attended)
