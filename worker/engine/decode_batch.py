"""The requests that draw a token each step, in one forward pass over the batch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import mlx.core as mx

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.proto.messages.events import FailureKind, TokenLogprob
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.contract.failure import kind_of, sentence
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk
from mlx_dp.worker.grammar.masks import GrammarMasks, RowMasks
from mlx_dp.worker.sampling.sampler import SampledStep, Sampler

_logger = logging.getLogger(__name__)
_GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The draws of a step, still lazy: row ``i`` belongs to ``keys[i]``.

    ``faults`` has the reason, by key, for rows that could not be sampled with their parameters.
    """

    keys: tuple[int, ...]
    sampled: SampledStep
    faults: Mapping[int, str] = field(default_factory=dict)

    def read_tokens(self) -> list[tuple[int, int]]:
        """Wait for the device; return (key, token) of every row."""
        tokens: list[int] = self.sampled.tokens.tolist()  # type: ignore[assignment]
        return list(zip(self.keys, tokens, strict=True))

    def read(self) -> list[tuple[int, int, TokenLogprob | None]]:
        """Wait for the device; return (key, token, log-probability) of every row."""
        logprobs = self.sampled.read_logprobs()
        return [
            (key, token, logprobs.get(row)) for row, (key, token) in enumerate(self.read_tokens())
        ]


@dataclass(slots=True)
class DecodeRow:
    """One request in the batch. ``drawn`` counts launched draws and the answer's earlier tokens.

    ``fault``: why its sampling parameters cannot be used; it is sampled greedily until it is
    removed. ``left``: it was removed, and only its caches remain, of which ``saves`` and
    ``snapshot`` are copied out first.
    """

    key: int
    request: EngineRequest
    drawn: int
    fault: str | None = None
    left: bool = False
    saves: tuple[Save, ...] = ()
    snapshot: int | None = None

    @property
    def has_saves(self) -> bool:
        """Whether KV or state of the row will be copied out."""
        return bool(self.saves) or self.snapshot is not None

    @property
    def position(self) -> int:
        """Absolute position of the next token to be drawn."""
        return len(self.request.prompt_ids) + self.drawn

    @property
    def done(self) -> bool:
        return self.left or self.drawn >= self.request.max_tokens


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass, launched but not sampled. ``logits`` [rows, vocab] are still lazy."""

    rows: list[DecodeRow]
    logits: mx.array
    mixed: list[Prefill]


class DecodeBatch:
    """Launches steps, each on the lazy tokens of the step before."""

    def __init__(
        self, caches: DecodeCaches, segments: Segments, grammars: GrammarMasks, *, vocab_size: int
    ) -> None:
        self._caches = caches
        self._segments = segments
        self._grammars = grammars
        self._sampler = Sampler(vocab_size)
        self._rows: dict[int, DecodeRow] = {}
        self._order: tuple[int, ...] = ()
        self._last: LaunchedStep | None = None
        self._first_tokens: dict[int, int] = {}
        self._forward: _Forward | None = None

    def __len__(self) -> int:
        """The number of rows with tokens left to draw."""
        return sum(not row.done for row in self._rows.values())

    def join(self, key: int, request: EngineRequest, prefill: Prefill, *, room: int) -> None:
        """Add a request whose prompt is complete.

        A request that cannot be prepared for sampling reports a fault at its next token. Raises
        errors that are not the request's fault: out of memory, or a lost peer.
        """
        self._caches.join(key, prefill, room=room)
        row = DecodeRow(key, request, drawn=len(request.output_ids))
        row.fault = self._prepare(row)
        if row.fault is not None:
            row.request = replace(request, params=_GREEDY, grammar=None)
        self._rows[key] = row
        self._first_tokens[key] = (request.output_ids or request.prompt_ids)[-1]

    def _prepare(self, row: DecodeRow) -> str | None:
        """Prepare the sampling of one row; return why that failed, or None."""
        try:
            self._sampler.rehearse(row.request, row.position)
            self._grammars.join(row.key, row.request)
        except Exception as error:
            if kind_of(error) is not FailureKind.INTERNAL:
                raise
            _logger.exception("a request cannot be sampled and ends with an error")
            return f"the request cannot be sampled: {sentence(error)}"
        return None

    def save_prefix(self, key: int, saves: tuple[Save, ...], snapshot: int | None) -> bool:
        """Have a row's KV and state copied when it leaves; False: the row is not in the batch."""
        row = self._rows.get(key)
        if row is None:
            return False
        row.saves, row.snapshot = saves, snapshot
        return True

    def leave(self, key: int) -> None:
        """Remove a request; a row that is not in the batch is no error.

        Its caches are dropped before the next step, or now if there is no next step: moving another
        row into the gap waits for the device, and the report of the end must not wait.
        """
        if (row := self._rows.get(key)) is None:
            return
        row.left = True
        if not len(self):
            self.drop_saved()

    def drop_done(self) -> None:
        """Drop the rows that left or drew their last token."""
        self._drop([row for row in self._rows.values() if row.done])

    def drop_saved(self) -> None:
        """Drop the rows that left, or drew their last token and have saves."""
        self._drop([row for row in self._rows.values() if row.left or (row.done and row.has_saves)])

    def _drop(self, done: Sequence[DecodeRow]) -> None:
        if not done:
            return
        self._save([row for row in done if row.has_saves])
        place = {key: at for at, key in enumerate(self._order)}
        # From the end of the batch, so that no row is moved that is about to be dropped.
        for row in sorted(done, key=lambda row: place.get(row.key, -1), reverse=True):
            del self._rows[row.key]
            self._first_tokens.pop(row.key, None)
            self._caches.leave(row.key)
            self._grammars.leave(row.key)

    def launch_forward(self, chunks: Sequence[PromptChunk] = ()) -> None:
        """Run the model on one token of every row and on the mixed chunks. No row may be done."""
        order, logits = self._caches.forward(self._input, chunks)
        rows = [self._rows[key] for key in order]
        assert not any(row.done for row in rows), "drop_done() comes first"
        if order != self._order:
            self._sampler.set_rows(order, [row.request for row in rows])
        self._order = order
        self._forward = _Forward(rows, logits, [chunk.prefill for chunk in chunks])
        self._first_tokens = {}

    @property
    def launch_reads(self) -> bool:
        """Whether a launch waits for the tokens of the step before, see ``launch_sampling``."""
        return len(self._grammars) > 0

    def launch_sampling(self) -> LaunchedStep:
        """Draw the tokens of the launched forward pass.

        If rows have grammars, this waits for the tokens of the step before. The device runs the
        forward pass while the masks are computed.
        """
        forward, self._forward = self._forward, None
        assert forward is not None, "launch_forward() comes first"
        rows = forward.rows
        masks = self._masks(forward) if len(self._grammars) else None
        sampled = self._sampler.draw(forward.logits, [row.position for row in rows], masks)
        mx.async_eval(sampled.arrays(), self._sampler.evaluated(), self._computed(forward))
        faults = {row.key: row.fault for row in rows if row.fault is not None}
        if masks is not None:
            faults |= self._grammars.faults()
        self._last = LaunchedStep(self._order, sampled, faults)
        for row in rows:
            row.drawn += 1
        return self._last

    def _masks(self, forward: "_Forward") -> RowMasks | None:
        """Advance grammars by each token of the step before, once; fill the masks of the next."""
        mx.async_eval(forward.logits, self._computed(forward))
        if self._last is not None:
            self._grammars.advance(self._last.read_tokens())
        return self._grammars.fill(self._order)

    def _computed(self, forward: "_Forward") -> list[mx.array]:
        """Return the arrays to evaluate with each step, or their graph would grow."""
        mixed = [array for prefill in forward.mixed for array in prefill.arrays()]
        return self._caches.arrays() + mixed

    def _save(self, rows: Sequence[DecodeRow]) -> None:
        """Copy out KV and states that outlive their rows, and wait for the copies: the next step
        writes in place only when no other reader is pending.
        """
        caches = self._caches
        copies: list[mx.array] = []
        for row in rows:
            saved_kv = partial(caches.saved_kv, row.key)
            snapshot = partial(caches.snapshot, row.key)
            copies += self._segments.save_row(row.saves, saved_kv, row.snapshot, snapshot)
        if copies:
            mx.eval(copies)

    def _input(self, keys: tuple[int, ...]) -> mx.array:
        """Return the newest token of these rows, [rows]: lazy except for rows that just joined."""
        if not self._first_tokens and self._last is not None and keys == self._last.keys:
            return self._last.sampled.tokens
        known = list(self._first_tokens.items())
        index = {key: i for i, (key, _) in enumerate(known)}
        tokens = mx.array([token for _, token in known], dtype=mx.int32)
        if self._last is not None:
            at = {key: len(known) + i for i, key in enumerate(self._last.keys)}
            index = at | index
            tokens = mx.concatenate([tokens, self._last.sampled.tokens])
        return tokens[mx.array([index[key] for key in keys], dtype=mx.int32)]
