"""The caches of all requests that decode together, of every kind in a model."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import MIN_WIDTH, SLAB_TOKENS, KVBatch
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.batch.state_rows import StateRows
from mlx_dp.kvcache.kinds import Store
from mlx_dp.kvcache.kv_row import LayerKV, from_ring, to_ring
from mlx_dp.kvcache.layout import CacheLayout
from mlx_dp.kvcache.row_content import RowContent, Snapshot


class BatchCaches:
    """Rows of KV, windows and states in one batch order; ``caches`` go to the model.

    ``state_sizes`` is the number of arrays in each state.
    """

    def __init__(
        self,
        layout: CacheLayout,
        form: BatchForm,
        state_sizes: Sequence[int],
        *,
        min_width: int = MIN_WIDTH,
        slab_tokens: int = SLAB_TOKENS,
    ) -> None:
        self._windows = layout.kv_windows
        self._states = StateRows(state_sizes)
        self._kv = KVBatch(self._windows, form, min_width=min_width, slab_tokens=slab_tokens)
        kv, states = iter(self._kv.caches), iter(self._states.caches)
        self.caches: list[Any] = layout.nest(
            [next(states) if leaf.store is Store.STATE else next(kv) for leaf in layout.leaves]
        )

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes + self._states.nbytes

    @property
    def num_buffers(self) -> int:
        return self._kv.num_buffers + self._states.num_buffers

    @property
    def used_tokens(self) -> int:
        return self._kv.used_tokens

    @property
    def kv(self) -> KVBatch:
        return self._kv

    def join(self, key: int, content: RowContent, *, room: int) -> None:
        """Copy a row in. ``room`` is the number of tokens that it is expected to reach."""
        grown, windows = iter(content.kv), iter(content.recent.windows)
        kv = [
            next(grown) if window is None else to_ring(next(windows), content.length)
            for window in self._windows
        ]
        self._kv.join(key, kv, length=content.length, room=room)
        self._states.join(key, content.recent.states)

    def leave(self, key: int) -> None:
        self._kv.leave(key)
        self._states.leave(key)

    def length(self, key: int) -> int:
        return self._kv.length(key)

    def saved_kv(self, key: int, start: int, end: int) -> list[LayerKV]:
        """Return views of a row's tokens, of the leaves that keep every token."""
        views = self._kv.views(key, start, end)
        return [view for view, window in zip(views, self._windows, strict=True) if window is None]

    def snapshot(self, key: int) -> Snapshot:
        """Return views of a row's present windows and states."""
        length = self._kv.length(key)
        views = self._kv.views(key, length, length)
        windows = [
            from_ring(view, length)
            for view, window in zip(views, self._windows, strict=True)
            if window is not None
        ]
        return Snapshot(length, tuple(windows), tuple(self._states.content(key)))

    def compact(self) -> None:
        self._kv.compact()
        self._states.compact()

    def begin_step(
        self, chunks: Sequence[MixedChunk] = (), *, decode: bool = True
    ) -> tuple[int, ...]:
        """Prepare one token for every row, see ``KVBatch.begin_step``."""
        assert not chunks or not self._states.caches, "chunks are rows without a state"
        order = self._kv.begin_step(chunks, decode=decode)
        if decode:
            self._states.arrange(order)
        return order

    def end_step(self) -> list[mx.array]:
        """Check the pass, see ``KVBatch.end_step``."""
        return self._kv.end_step()

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate with each step, besides its output."""
        return self._states.arrays()

    def check(self) -> None:
        self._kv.check()
