"""The caches of decoding requests: in the batch, or unbatched beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_caches import BatchCaches
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.padded_pass import PaddedPass
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.kvcache.row_content import (
    RowContent,
    Snapshot,
    cache_arrays,
    growth_nbytes,
    read_caches,
)
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk
from mlx_dp.worker.loading.loaded_model import LoadedModel

TokensOf = Callable[[tuple[int, ...]], mx.array]
"""The newest tokens [rows] of these keys."""


@dataclass(slots=True)
class _UnbatchedRow:
    caches: list[Any]
    length: int


class UnbatchedRows:
    """Rows that run one by one, each in the model's own caches.

    For models that no batch can run, and for rows whose state does not have its final shape yet.

    A row's step is the same as in mlx-lm's single-request generation.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._layout = loaded.layout
        self._rows: dict[int, _UnbatchedRow] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def num_buffers(self) -> int:
        return len(self.arrays())

    @property
    def used_tokens(self) -> int:
        return sum(row.length for row in self._rows.values())

    def growth_nbytes(self) -> int:
        """Return the bytes that the next step adds for rows whose caches are full."""
        return sum(growth_nbytes(self._layout, row.caches) for row in self._rows.values())

    def join(self, key: int, caches: list[Any], length: int) -> None:
        assert key not in self._rows, f"row {key} is here already"
        self._rows[key] = _UnbatchedRow(caches, length)

    def leave(self, key: int) -> None:
        del self._rows[key]

    def length(self, key: int) -> int:
        return self._rows[key].length

    def content(self, key: int) -> RowContent | None:
        """Return a row's content, not copied; None: a state was not written yet."""
        row = self._rows[key]
        return read_caches(self._layout, row.caches, row.length) if row.length else None

    def forward(self, key: int, token: mx.array) -> mx.array:
        """Run a row's newest token [1]; return its logits [1, vocab]."""
        row = self._rows[key]
        row.length += 1
        logits: mx.array = self._model(token[None], cache=row.caches)
        return logits[:, -1, :]

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate with each step, or their graph would grow."""
        return [array for row in self._rows.values() for array in cache_arrays(row.caches)]


class DecodeCaches:
    """Runs the model on one token of every row."""

    def __init__(self, loaded: LoadedModel, form: BatchForm) -> None:
        self._loaded = loaded
        self._unbatched = UnbatchedRows(loaded)
        self._batch: BatchCaches | None = None
        self._in_batch: set[int] = set()
        self._room: dict[int, int] = {}
        if loaded.batch is not None and not form.single:
            self._batch = BatchCaches(loaded.layout, form, loaded.batch.state_sizes)
        self._mixes_chunks = form.split and not loaded.layout.hybrid
        self._pads = form.pads

    @property
    def mixes_chunks(self) -> bool:
        """Whether prefill chunks can be further rows of a decode's forward pass."""
        return self._mixes_chunks

    @property
    def pads(self) -> bool:
        """Whether chunks of several prompts can run together only in a pass of their own, padded to
        the longest.
        """
        return self._pads

    @property
    def nbytes(self) -> int:
        return self._unbatched.nbytes + (self._batch.nbytes if self._batch is not None else 0)

    @property
    def num_buffers(self) -> int:
        return self._unbatched.num_buffers + (
            self._batch.num_buffers if self._batch is not None else 0
        )

    @property
    def used_tokens(self) -> int:
        batch = self._batch.used_tokens if self._batch is not None else 0
        return batch + self._unbatched.used_tokens

    def row_nbytes(self, num_tokens: int) -> int:
        """Return the most bytes that a row of ``num_tokens`` tokens adds."""
        shape = self._loaded.shape
        if self._batch is None:
            return shape.request_nbytes(num_tokens)
        kv = self._batch.kv
        own = shape.request_nbytes(kv.width_for(num_tokens) + kv.tail_tokens)
        return own + kv.widened_tokens(num_tokens) * shape.request_nbytes(1)

    def growth_nbytes(self) -> int:
        """Return the bytes that the next step adds for full rows and rows that join the batch."""
        if self._batch is None:
            return self._unbatched.growth_nbytes()
        moving = sum(self.row_nbytes(self._room[key]) for key in self._unbatched.keys)
        kv = self._batch.kv
        widths = [width + kv.tail_tokens for width in kv.growing_widths()]
        return moving + sum(self._loaded.shape.request_nbytes(width) for width in widths)

    def set_spare(self, nbytes: int | None) -> None:
        """Set the bytes that may be allocated before a row needs them; None: any number."""
        if self._batch is not None:
            self._batch.kv.spare_nbytes = nbytes

    def prepare(self, room: int, share: float, *, set_aside: int) -> None:
        """As ``KVBatch.prepare``."""
        if self._batch is not None:
            self._batch.kv.prepare(room, share, set_aside=set_aside)

    def compact(self) -> None:
        if self._batch is not None:
            self._batch.compact()

    def join(self, key: int, prefill: Prefill, *, room: int) -> None:
        """Add a request whose prompt is complete. ``room``: the length that it may reach."""
        self._room[key] = room
        layout = self._loaded.batch
        if self._batch is not None and layout is not None:
            content = prefill.content()
            if content is None and not layout.state_shapes:
                content = layout.empty
            if self._try_join_batch(key, content):
                return
        self._unbatched.join(key, prefill.caches, prefill.done)

    def leave(self, key: int) -> None:
        del self._room[key]
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            self._in_batch.remove(key)
            self._batch.leave(key)
        else:
            self._unbatched.leave(key)

    def saved_kv(self, key: int, save: Save) -> list[LayerKV]:
        """Return views of some tokens of a row, of the leaves that keep every token."""
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            return self._batch.saved_kv(key, save.start, save.end)
        content = self._unbatched.content(key)
        assert content is not None, f"row {key} holds nothing"
        return content.saved_kv(save.start, save.end)

    def snapshot(self, key: int) -> Snapshot | None:
        """Return views of a row's present windows and states; None: there are none yet."""
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            return self._batch.snapshot(key)
        content = self._unbatched.content(key)
        return None if content is None else content.recent

    def forward(
        self, tokens_of: TokensOf, chunks: Sequence[PromptChunk]
    ) -> tuple[tuple[int, ...], mx.array]:
        """Run one token of every row, together with the chunks.

        Returns the rows' keys in order, and their logits [rows, vocab].
        """
        self._move_to_batch()
        order: tuple[int, ...] = ()
        logits: list[mx.array] = []
        batch = self._batch
        if batch is not None and (self._in_batch or chunks):
            order = batch.begin_step([each.chunk for each in chunks], decode=bool(self._in_batch))
            logits.append(self._run_batch(batch, tokens_of(order), chunks)[: len(order)])
        alone = self._unbatched.keys
        if alone:
            tokens = tokens_of(alone)
            logits += [
                self._unbatched.forward(key, tokens[i : i + 1]) for i, key in enumerate(alone)
            ]
        return (*order, *alone), logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def run_chunks(self, chunks: Sequence[PromptChunk]) -> None:
        """Run chunks of several prompts in one forward pass, without any row."""
        if self._pads:
            self._run_padded(chunks)
            return
        assert self._batch is not None, "there is no batch"
        self._batch.begin_step([chunk.chunk for chunk in chunks], decode=False)
        # Nothing needs the logits, so the LM head is never computed.
        self._run_batch(self._batch, mx.zeros((0,), dtype=mx.int32), chunks)
        mx.async_eval([chunk.prefill.arrays() for chunk in chunks])

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate with each step, besides its results."""
        batch = self._batch.arrays() if self._batch is not None else []
        return batch + self._unbatched.arrays()

    def check(self) -> None:
        if self._batch is not None:
            self._batch.check()
        assert self._in_batch.isdisjoint(self._unbatched.keys), self._in_batch
        assert self._in_batch.union(self._unbatched.keys) == self._room.keys(), self._room

    def _run_padded(self, chunks: Sequence[PromptChunk]) -> None:
        padded = PaddedPass(self._loaded.layout, [chunk.chunk for chunk in chunks])
        rows = [mx.pad(chunk.ids, (0, padded.width - chunk.ids.size)) for chunk in chunks]
        self._loaded.model(mx.stack(rows), cache=padded.caches)
        unseen = padded.end()
        mx.async_eval([chunk.prefill.arrays() for chunk in chunks], unseen)

    def _run_batch(
        self, batch: BatchCaches, tokens: mx.array, chunks: Sequence[PromptChunk]
    ) -> mx.array:
        if chunks:
            tokens = mx.concatenate([tokens, *(chunk.ids for chunk in chunks)])
        logits: mx.array = self._loaded.model(tokens[:, None], cache=batch.caches)
        unseen = batch.end_step()
        # Nothing else would compute them, and their graph would grow.
        return mx.depends(logits[:, -1, :], unseen) if unseen else logits[:, -1, :]

    def _move_to_batch(self) -> None:
        """Move unbatched rows into the batch as soon as they can join it."""
        if self._batch is None:
            return
        for key in self._unbatched.keys:
            if self._try_join_batch(key, self._unbatched.content(key)):
                self._unbatched.leave(key)

    def _try_join_batch(self, key: int, content: RowContent | None) -> bool:
        """Add a row to the batch if its states have their final shapes; return whether it did."""
        layout = self._loaded.batch
        assert self._batch is not None and layout is not None, "there is no batch"
        if content is None or not layout.accepts(content):
            return False
        self._batch.join(key, content, room=self._room[key])
        self._in_batch.add(key)
        return True
