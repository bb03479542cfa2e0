"""Where the caches of decoding requests are: in the batch, or beside it one by one."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_dp.kvcache.batch_caches import BatchCaches
from mlx_dp.kvcache.batch_form import BatchForm
from mlx_dp.kvcache.cached_prefix import Save
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.padded_pass import PaddedPass
from mlx_dp.kvcache.row_content import RowContent, Snapshot
from mlx_dp.worker.guest import Guest
from mlx_dp.worker.loaded_model import LoadedModel
from mlx_dp.worker.prefill import Prefill
from mlx_dp.worker.solo_rows import SoloRows

TokensOf = Callable[[tuple[int, ...]], mx.array]
"""The newest tokens [rows] of these keys."""


class DecodeCaches:
    """Runs the model on one token of every row."""

    def __init__(self, loaded: LoadedModel, form: BatchForm) -> None:
        self._loaded = loaded
        self._solo = SoloRows(loaded)
        self._batch: BatchCaches | None = None
        self._in_batch: set[int] = set()
        self._room: dict[int, int] = {}
        if loaded.batch is not None and not form.single:
            self._batch = BatchCaches(loaded.layout, form, loaded.batch.state_sizes)
        self._takes_guests = form.split and not loaded.layout.hybrid
        self._pads = form.pads

    @property
    def takes_guests(self) -> bool:
        """Chunks of prompts can be further rows of a forward pass."""
        return self._takes_guests

    @property
    def pads(self) -> bool:
        """Chunks of several prompts can be run together, but only in a pass of their own, in which
        they are padded to the longest."""
        return self._pads

    @property
    def nbytes(self) -> int:
        return self._solo.nbytes + (self._batch.nbytes if self._batch is not None else 0)

    @property
    def num_buffers(self) -> int:
        return self._solo.num_buffers + (self._batch.num_buffers if self._batch is not None else 0)

    @property
    def used_tokens(self) -> int:
        batch = self._batch.used_tokens if self._batch is not None else 0
        return batch + self._solo.used_tokens

    def row_nbytes(self, num_tokens: int) -> int:
        """Bytes that a row which needs so many tokens adds at most."""
        shape = self._loaded.shape
        if self._batch is None:
            return shape.request_nbytes(num_tokens)
        kv = self._batch.kv
        own = shape.request_nbytes(kv.width_for(num_tokens) + kv.tail_tokens)
        return own + kv.widened_tokens(num_tokens) * shape.request_nbytes(1)

    def growth_nbytes(self) -> int:
        """Bytes that the next step adds for rows which have filled what they have, or move."""
        if self._batch is None:
            return self._solo.growth_nbytes()
        moving = sum(self.row_nbytes(self._room[key]) for key in self._solo.keys)
        kv = self._batch.kv
        widths = [width + kv.tail_tokens for width in kv.growing_widths()]
        return moving + sum(self._loaded.shape.request_nbytes(width) for width in widths)

    def set_spare(self, nbytes: int | None) -> None:
        """Say how much memory there is for room that no row needs yet; None: any."""
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
        """Add a request whose prompt is in. ``room``: the tokens that it is expected to reach."""
        self._room[key] = room
        layout = self._loaded.batch
        if self._batch is not None and layout is not None:
            content = prefill.content()
            if content is None and not layout.state_shapes:
                content = layout.empty
            if self._enters_batch(key, content):
                return
        self._solo.join(key, prefill.caches, prefill.done)

    def leave(self, key: int) -> None:
        del self._room[key]
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            self._in_batch.remove(key)
            self._batch.leave(key)
        else:
            self._solo.leave(key)

    def saved_kv(self, key: int, save: Save) -> list[LayerKV]:
        """Some tokens of a row, in the leaves that keep all, as views."""
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            return self._batch.saved_kv(key, save.start, save.end)
        content = self._solo.content(key)
        assert content is not None, f"row {key} holds nothing"
        return content.saved_kv(save.start, save.end)

    def snapshot(self, key: int) -> Snapshot | None:
        """A row's windows and states as they are now, as views; None: it has none yet."""
        if key in self._in_batch:
            assert self._batch is not None, "there is no batch"
            return self._batch.snapshot(key)
        content = self._solo.content(key)
        return None if content is None else content.recent

    def forward(
        self, tokens_of: TokensOf, guests: Sequence[Guest]
    ) -> tuple[tuple[int, ...], mx.array]:
        """Run one token of every row, and the guests' with them.

        Returns the rows' keys in order, and their logits [rows, vocab].
        """
        self._move_to_batch()
        order: tuple[int, ...] = ()
        logits: list[mx.array] = []
        batch = self._batch
        if batch is not None and (self._in_batch or guests):
            order = batch.begin_step([g.chunk for g in guests], decode=bool(self._in_batch))
            logits.append(self._run_batch(batch, tokens_of(order), guests)[: len(order)])
        solo = self._solo.keys
        if solo:
            tokens = tokens_of(solo)
            logits += [self._solo.forward(key, tokens[i : i + 1]) for i, key in enumerate(solo)]
        return (*order, *solo), logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def run_guests(self, guests: Sequence[Guest]) -> None:
        """Run chunks of several prompts in one forward pass, without any row."""
        if self._pads:
            self._run_padded(guests)
            return
        assert self._batch is not None, "there is no batch"
        self._batch.begin_step([guest.chunk for guest in guests], decode=False)
        # Nothing needs the logits, so the LM head is never computed.
        self._run_batch(self._batch, mx.zeros((0,), dtype=mx.int32), guests)
        mx.async_eval([guest.prefill.arrays() for guest in guests])

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with each step beside what it yields."""
        batch = self._batch.arrays() if self._batch is not None else []
        return batch + self._solo.arrays()

    def check(self) -> None:
        if self._batch is not None:
            self._batch.check()
        assert self._in_batch.isdisjoint(self._solo.keys), self._in_batch
        assert self._in_batch.union(self._solo.keys) == self._room.keys(), self._room

    def _run_padded(self, guests: Sequence[Guest]) -> None:
        padded = PaddedPass(self._loaded.layout, [guest.chunk for guest in guests])
        rows = [mx.pad(guest.ids, (0, padded.width - guest.ids.size)) for guest in guests]
        self._loaded.model(mx.stack(rows), cache=padded.caches)
        unseen = padded.end()
        mx.async_eval([guest.prefill.arrays() for guest in guests], unseen)

    def _run_batch(self, batch: BatchCaches, tokens: mx.array, guests: Sequence[Guest]) -> mx.array:
        if guests:
            tokens = mx.concatenate([tokens, *(guest.ids for guest in guests)])
        logits: mx.array = self._loaded.model(tokens[:, None], cache=batch.caches)
        unseen = batch.end_step()
        # What nobody looks at would never be computed, and its graph would pile up.
        return mx.depends(logits[:, -1, :], unseen) if unseen else logits[:, -1, :]

    def _move_to_batch(self) -> None:
        """Let rows join the batch that could not before."""
        if self._batch is None:
            return
        for key in self._solo.keys:
            if self._enters_batch(key, self._solo.content(key)):
                self._solo.leave(key)

    def _enters_batch(self, key: int, content: RowContent | None) -> bool:
        """Let a row join the batch if it can lie there."""
        layout = self._loaded.batch
        assert self._batch is not None and layout is not None, "there is no batch"
        if content is None or not layout.takes(content):
            return False
        self._batch.join(key, content, room=self._room[key])
        self._in_batch.add(key)
        return True
