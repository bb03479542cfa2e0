"""All requests that draw a token each step, as one forward pass over the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.batch_form import BatchForm
from mlx_dp.kvcache.kv_batch import KVBatch
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.worker.engine import EngineRequest
from mlx_dp.worker.guest import Guest
from mlx_dp.worker.launched_step import LaunchedStep
from mlx_dp.worker.sampling import Sampler


@dataclass(slots=True)
class DecodeRow:
    """One request in the batch. ``drawn`` counts launched draws, the answer's earlier ones too.

    ``left``: nobody wants it any more, and only its KV is still here.
    """

    key: int
    request: EngineRequest
    drawn: int
    left: bool = False

    @property
    def position(self) -> int:
        """Absolute position of the next token to be drawn."""
        return len(self.request.prompt_ids) + self.drawn

    @property
    def done(self) -> bool:
        return self.left or self.drawn >= self.request.max_tokens


class DecodeBatch:
    """Launches steps, each on the lazy tokens of the one before."""

    def __init__(
        self, model: Any, empty: Sequence[LayerKV], *, vocab_size: int, form: BatchForm
    ) -> None:
        """``empty`` are rows without content, which say every cache's heads, widths and dtype."""
        self._model = model
        self._empty = empty
        self._split = form.split
        self._kv = KVBatch(len(empty), form)
        self._sampler = Sampler(vocab_size)
        self._rows: dict[int, DecodeRow] = {}
        self._order: tuple[int, ...] = ()
        self._last: LaunchedStep | None = None
        self._first_tokens: dict[int, int] = {}

    def __len__(self) -> int:
        """Rows that have tokens left to draw."""
        return sum(not row.done for row in self._rows.values())

    @property
    def takes_guests(self) -> bool:
        """There are rows to ride along with, and the model can."""
        return self._split and len(self) > 0

    @property
    def used_tokens(self) -> int:
        return self._kv.used_tokens

    def join(
        self, key: int, request: EngineRequest, content: Sequence[LayerKV] | None, *, room: int
    ) -> None:
        """Add a request. ``content`` is the KV of all its tokens but the last; None: it has one."""
        length = request.prefill_tokens - 1
        self._kv.join(key, content or self._empty, length=length, room=room)
        self._rows[key] = DecodeRow(key, request, drawn=len(request.output_ids))
        self._first_tokens[key] = (request.output_ids or request.prompt_ids)[-1]

    def leave(self, key: int) -> None:
        """Drop a request; a row that is not here any more is no error.

        Its KV goes before the next step, or now when no step is to come: a row that moves into
        the gap waits for the device, and the news of the end must not.
        """
        if (row := self._rows.get(key)) is None:
            return
        row.left = True
        if not len(self):
            self.drop_done()

    def drop_done(self) -> None:
        """Let the rows go that left, or spent their budget with the last step."""
        done = [key for key, row in self._rows.items() if row.done]
        if not done:
            return
        place = {key: at for at, key in enumerate(self._order)}
        # From the end of the batch, so that no row moves that goes as well.
        for key in sorted(done, key=lambda key: place.get(key, -1), reverse=True):
            del self._rows[key]
            self._first_tokens.pop(key, None)
            self._kv.leave(key)

    def launch(self, guest: Guest | None = None) -> LaunchedStep:
        """Launch one token for every row, and a guest's chunk with them. No row is done."""
        order = self._kv.begin_step(guest.chunk if guest is not None else None)
        rows = [self._rows[key] for key in order]
        assert not any(row.done for row in rows), "drop_done() comes first"
        if order != self._order:
            self._sampler.set_rows(order, [row.request for row in rows])
        tokens = self._input(order)
        if guest is not None:
            tokens = mx.concatenate([tokens, guest.ids])
        logits = self._model(tokens[:, None], cache=self._kv.caches)
        self._kv.end_step()
        sampled = self._sampler.draw(logits[: len(order), -1, :], [row.position for row in rows])
        riding = guest.prefill.state() if guest is not None else []
        mx.async_eval(sampled.arrays(), self._sampler.evaluated(), riding)
        self._order = order
        self._last = LaunchedStep(order, sampled)
        for row in rows:
            row.drawn += 1
        return self._last

    def _input(self, order: tuple[int, ...]) -> mx.array:
        """The newest token of every row, [rows]: still lazy but for those that just joined."""
        if not self._first_tokens and self._last is not None and order == self._last.keys:
            return self._last.sampled.tokens
        known = list(self._first_tokens.items())
        index = {key: i for i, (key, _) in enumerate(known)}
        tokens = mx.array([token for _, token in known], dtype=mx.int32)
        if self._last is not None:
            at = {key: len(known) + i for i, key in enumerate(self._last.keys)}
            index = at | index
            tokens = mx.concatenate([tokens, self._last.sampled.tokens])
        self._first_tokens = {}
        return tokens[mx.array([index[key] for key in order], dtype=mx.int32)]
