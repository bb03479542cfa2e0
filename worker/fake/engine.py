"""An engine without a model: deterministic, of configurable speed, without MLX."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.worker.contract.engine import (
    Drawn,
    EngineFacts,
    EngineMemory,
    EngineRequest,
    PrefillChunk,
    StepPlan,
)
from mlx_dp.worker.fake.store import FakeStore
from mlx_dp.worker.fake.tokens import FakeAnswer

# The sizes of a small model, so that plans and reports show realistic numbers.
KV_BYTES_PER_TOKEN = 1024
AUXILIARY_BYTES_PER_SLOT = 65_536


@dataclass(slots=True)
class FakeRow:
    """One slot. ``ids`` are prompt and answer, including drawn tokens that are under way.

    ``filled`` counts the prompt's tokens that are prefilled, ``content`` the tokens that were fed,
    and ``position`` is the answer position of the next token to draw.
    """

    answer: FakeAnswer
    ids: list[int]
    prompt_tokens: int
    position: int
    max_tokens: int
    filled: int = 0
    content: int = 0
    left: bool = False
    """Whether a later step was launched after the one that drew its last token."""

    @property
    def joined(self) -> bool:
        return self.filled == self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether its prompt is complete, and tokens are left to draw."""
        return self.joined and self.position < self.max_tokens

    @property
    def fed_ids(self) -> Sequence[int]:
        return self.ids[: self.content]


@dataclass(slots=True)
class _Launched:
    """A step under way, which the simulated device finishes at ``done_at``."""

    done_at: float
    drawn: list[Drawn]


class FakeEngine:
    """Implements ``Engine``; ``fake.tokens`` stands for the model.

    It behaves like a device that runs one step after another: a step is launched before the
    previous one is read, and the next call returns its tokens, once they are due.
    """

    def __init__(
        self,
        options: FakeEngineOptions,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        prefix_cache: bool = False,
    ) -> None:
        self._options = options
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._sleep = sleep
        self._capacity: OwnerCapacity | None = None
        self._rows: dict[int, FakeRow] = {}
        self._joined_rows = 0
        self._joined_tokens = 0
        self._room_tokens = 0
        """KV tokens allocated for rows. They stay allocated until ``compact``."""
        self._shape = _shape(options)
        self._store = FakeStore(self._shape, stateful=options.hybrid)
        self._launched: _Launched | None = None

    @classmethod
    def load(
        cls,
        options: FakeEngineOptions,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        prefix_cache: bool = False,
    ) -> "FakeEngine":
        """Return an engine after the configured load time."""
        if options.load_s:
            sleep(options.load_s)
        return cls(options, clock=clock, sleep=sleep, prefix_cache=prefix_cache)

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            shape=self._shape,
            pool_tokens=self._options.pool_tokens,
            device="fake",
            prefix_cache=self._prefix_cache,
            stateful=self._options.hybrid,
        )

    @property
    def peers(self) -> None:
        """None: the fake engine has no peers, even in a group."""

    def open(self, capacity: OwnerCapacity) -> None:
        assert self._capacity is None, "opened twice"
        self._capacity = capacity

    def warm_up(self) -> None:
        """Do nothing: the first step is as fast as any other."""
        assert self._capacity is not None, "not open"

    def reset(self) -> None:
        """Do nothing: there are no measurements."""
        assert not self._rows, self._rows

    def fault(self, request: EngineRequest) -> str | None:
        if request.grammar is None:
            return None
        return f"the fake engine follows no grammar, and got one as {request.grammar.kind.value}"

    def add(self, slot: int, request: EngineRequest) -> None:
        assert self._capacity is not None, "not open"
        assert 0 <= slot < self._capacity.request_slots, (slot, self._capacity.request_slots)
        assert slot not in self._rows, f"slot {slot} is taken"
        assert len(request.output_ids) < request.max_tokens, request
        self._rows[slot] = FakeRow(
            answer=FakeAnswer(
                self._options.seed,
                self._options.vocab_size,
                request.prompt_ids,
                request.params,
                request.stop_token_ids,
            ),
            ids=[*request.prompt_ids, *request.output_ids],
            prompt_tokens=request.prefill_tokens,
            position=len(request.output_ids),
            max_tokens=request.max_tokens,
        )

    def save_prefix(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        row = self._rows[slot]
        assert not row.left, f"slot {slot} has left the batch"
        self._store.save(row.fed_ids, saves)
        if snapshot is not None:
            self._store.snapshot(row.fed_ids, snapshot)

    def split(self, segment: int, at: int, head: int) -> None:
        self._store.split(segment, at, head)

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        self._store.drop(segments, snapshots)

    def remove(self, slot: int) -> None:
        assert slot in self._rows, f"slot {slot} is empty"
        row = self._rows.pop(slot)
        if row.joined:
            self._joined_rows -= 1
            self._joined_tokens -= row.content
        if self._launched is not None:
            kept = [drawn for drawn in self._launched.drawn if drawn.slot != slot]
            self._launched.drawn = kept

    @property
    def held_nbytes(self) -> int:
        states = self._joined_rows * self._shape.auxiliary_bytes_per_slot
        rows = self._room_tokens * self._shape.kv_bytes_per_token
        return rows + states + self._store.nbytes

    @property
    def held_buffers(self) -> int:
        return 0

    @property
    def row_buffers(self) -> int:
        return 0

    def growth_nbytes(self) -> int:
        grown = self._joined_tokens + sum(row.decodes for row in self._rows.values())
        return max(0, grown - self._room_tokens) * self._shape.kv_bytes_per_token

    def row_nbytes(self, num_tokens: int) -> int:
        return self._shape.request_nbytes(num_tokens)

    def compact(self) -> None:
        self._room_tokens = self._joined_tokens

    @property
    def busy(self) -> bool:
        if self._launched is not None and self._launched.drawn:
            return True
        return any(row.decodes for row in self._rows.values())

    @property
    def launch_blocks(self) -> bool:
        return False

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        before = self._launched
        self._launched = self._launch(plan)
        if before is None:
            return ()
        if (left_s := before.done_at - self._clock()) > 0.0:
            self._sleep(left_s)
        return tuple(before.drawn)

    def _launch(self, plan: StepPlan) -> _Launched:
        decoded = any(row.decodes for row in self._rows.values())
        for row in self._rows.values():
            row.left = row.joined and not row.decodes
        slots = [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots), f"two chunks of one slot: {slots}"
        for chunk in plan.prefill:
            self._prefill(self._rows[chunk.slot], chunk)
        drawn = [self._draw(slot, row) for slot, row in self._rows.items() if row.decodes]
        self._joined_tokens += len(drawn)
        self._room_tokens = max(self._room_tokens, self._joined_tokens)
        starts_at = self._clock() if self._launched is None else self._launched.done_at
        prefilled = sum(chunk.num_tokens for chunk in plan.prefill)
        duration_s = self._duration_s(prefilled, decoded=decoded)
        return _Launched(max(starts_at, self._clock()) + duration_s, drawn)

    def _prefill(self, row: FakeRow, chunk: PrefillChunk) -> None:
        if chunk.prefix is not None:
            assert not row.filled, f"slot {chunk.slot} has begun already"
            assert chunk.prefix.num_tokens < row.prompt_tokens, chunk
            self._store.verify(chunk.prefix, row.ids)
            row.filled = row.content = chunk.prefix.num_tokens
        assert 0 < chunk.num_tokens <= row.prompt_tokens - row.filled, (chunk, row.filled)
        row.filled += chunk.num_tokens
        row.content = min(row.filled, row.prompt_tokens - 1)
        if chunk.snapshot is not None:
            self._store.snapshot(row.fed_ids, chunk.snapshot)
        if chunk.saves:
            self._store.save(row.fed_ids, chunk.saves)
        if row.joined:
            self._joined_tokens += row.content
            self._joined_rows += 1

    def _draw(self, slot: int, row: FakeRow) -> Drawn:
        token = row.answer.token(row.position)
        logprob = row.answer.logprob(row.position)
        row.content += 1
        row.position += 1
        row.ids.append(token)
        return Drawn(slot=slot, token=token, logprob=logprob)

    def _duration_s(self, prefilled: int, *, decoded: bool) -> float:
        duration_s = 0.0
        if decoded and self._options.decode_tokens_per_s:
            duration_s += 1.0 / self._options.decode_tokens_per_s
        if self._options.prefill_tokens_per_s:
            duration_s += prefilled / self._options.prefill_tokens_per_s
        return duration_s

    def memory(self) -> EngineMemory:
        return EngineMemory(
            used_tokens=sum(row.content for row in self._rows.values()),
            device_nbytes=self.held_nbytes,
        )

    def close(self) -> None:
        self._rows.clear()
        self._store.clear()
        self._joined_rows = self._joined_tokens = self._room_tokens = 0
        self._launched = None


def _shape(options: FakeEngineOptions) -> ModelShape:
    attention_layers = 0 if options.pool_tokens is None else 1
    auxiliary_layers = 1 if options.hybrid else 0
    return ModelShape(
        num_layers=attention_layers + auxiliary_layers,
        attention_layers=attention_layers,
        auxiliary_layers=auxiliary_layers,
        kv_bytes_per_token=attention_layers * KV_BYTES_PER_TOKEN,
        auxiliary_bytes_per_slot=auxiliary_layers * AUXILIARY_BYTES_PER_SLOT,
        vocab_size=options.vocab_size,
        context_length=options.context_length,
        weights_nbytes=0,
    )
