"""An engine without a model: deterministic, as fast or as slow as asked, and free of MLX."""

from collections.abc import Callable
from dataclasses import dataclass

from mlx_dp.proto.messages import FakeEngineOptions
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.proto.ownership import OwnerCapacity
from mlx_dp.worker.engine import Drawn, EngineFacts, EngineMemory, EngineRequest, StepPlan
from mlx_dp.worker.fake_tokens import FakeAnswer

# As a small model has them, so that plans and reports show numbers of a familiar size.
KV_BYTES_PER_TOKEN = 1024
AUXILIARY_BYTES_PER_SLOT = 65_536


@dataclass(slots=True)
class _Row:
    """One slot. ``position`` is the answer position of the next token to draw."""

    answer: FakeAnswer
    unfilled: int
    position: int
    max_tokens: int
    content: int = 0


@dataclass(slots=True)
class _Launched:
    """A step under way, which the pretended device has done at ``done_at``."""

    done_at: float
    drawn: list[Drawn]


class FakeEngine:
    """Keeps the ``Engine`` contract, with ``fake_tokens`` for a model.

    Time passes as on a device that runs one step after another: a step is launched on the
    promises of the one before, and its tokens are returned by the next call, once they are due.
    """

    def __init__(
        self,
        options: FakeEngineOptions,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._capacity: OwnerCapacity | None = None
        self._rows: dict[int, _Row] = {}
        self._launched: _Launched | None = None

    @classmethod
    def load(
        cls,
        options: FakeEngineOptions,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> "FakeEngine":
        """Return an engine after as long as a model would take to load."""
        if options.load_s:
            sleep(options.load_s)
        return cls(options, clock=clock, sleep=sleep)

    @property
    def facts(self) -> EngineFacts:
        attention_layers = 0 if self._options.pool_tokens is None else 1
        auxiliary_layers = 1 if self._options.hybrid else 0
        return EngineFacts(
            shape=ModelShape(
                num_layers=attention_layers + auxiliary_layers,
                attention_layers=attention_layers,
                auxiliary_layers=auxiliary_layers,
                kv_bytes_per_token=KV_BYTES_PER_TOKEN * attention_layers,
                auxiliary_bytes_per_slot=AUXILIARY_BYTES_PER_SLOT * auxiliary_layers,
                vocab_size=self._options.vocab_size,
                context_length=self._options.context_length,
                weights_nbytes=0,
            ),
            pool_tokens=self._options.pool_tokens,
            device="fake",
        )

    def open(self, capacity: OwnerCapacity) -> None:
        assert self._capacity is None, "opened twice"
        self._capacity = capacity

    def warm_up(self) -> None:
        """Nothing to warm: the first step is as fast as any other."""
        assert self._capacity is not None, "not open"

    def add(self, slot: int, request: EngineRequest) -> None:
        assert self._capacity is not None, "not open"
        assert 0 <= slot < self._capacity.request_slots, (slot, self._capacity.request_slots)
        assert slot not in self._rows, f"slot {slot} is taken"
        assert len(request.output_ids) < request.max_tokens, request
        self._rows[slot] = _Row(
            answer=FakeAnswer(
                self._options.seed, self._options.vocab_size, request.prompt_ids, request.params
            ),
            unfilled=request.prefill_tokens,
            position=len(request.output_ids),
            max_tokens=request.max_tokens,
        )

    def remove(self, slot: int) -> None:
        assert slot in self._rows, f"slot {slot} is empty"
        del self._rows[slot]
        if self._launched is not None:
            kept = [drawn for drawn in self._launched.drawn if drawn.slot != slot]
            self._launched.drawn = kept

    @property
    def busy(self) -> bool:
        if self._launched is not None and self._launched.drawn:
            return True
        return any(_decodes(row) for row in self._rows.values())

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        before = self._launched
        self._launched = self._launch({chunk.slot: chunk.num_tokens for chunk in plan.prefill})
        if before is None:
            return ()
        if (left_s := before.done_at - self._clock()) > 0.0:
            self._sleep(left_s)
        return tuple(before.drawn)

    def _launch(self, chunks: dict[int, int]) -> _Launched:
        drawn: list[Drawn] = []
        decoded = False
        prefilled = 0
        for slot, row in self._rows.items():
            if _decodes(row):
                decoded = True
                row.content += 1
            elif (num_tokens := chunks.pop(slot, 0)) > 0:
                assert num_tokens <= row.unfilled, (slot, num_tokens, row.unfilled)
                row.unfilled -= num_tokens
                row.content += num_tokens
                prefilled += num_tokens
                if row.unfilled:
                    continue
            else:
                continue
            drawn.append(
                Drawn(
                    slot=slot,
                    token=row.answer.token(row.position),
                    logprob=row.answer.logprob(row.position),
                )
            )
            row.position += 1
        assert not chunks, f"nothing to prefill in {chunks}"
        starts_at = self._clock() if self._launched is None else self._launched.done_at
        duration_s = self._duration_s(prefilled, decoded=decoded)
        return _Launched(max(starts_at, self._clock()) + duration_s, drawn)

    def _duration_s(self, prefilled: int, *, decoded: bool) -> float:
        duration_s = 0.0
        if decoded and self._options.decode_tokens_per_s:
            duration_s += 1.0 / self._options.decode_tokens_per_s
        if self._options.prefill_tokens_per_s:
            duration_s += prefilled / self._options.prefill_tokens_per_s
        return duration_s

    def memory(self) -> EngineMemory:
        used_tokens = sum(row.content for row in self._rows.values())
        return EngineMemory(
            used_tokens=used_tokens,
            device_nbytes=used_tokens * self.facts.shape.kv_bytes_per_token,
        )

    def close(self) -> None:
        self._rows.clear()
        self._launched = None


def _decodes(row: _Row) -> bool:
    """Its prompt is in, and its budget is not spent."""
    return not row.unfilled and row.position < row.max_tokens
