"""The running totals of the control plane."""

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

from mlx_dp.orchestrator.service_counters import ControllerCounters
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import FinishReason


@dataclass(slots=True)
class Counters:
    """The controller's own running totals, of which ``ControllerCounters`` is a snapshot."""

    requests_started: int = 0
    requests_ok: int = 0
    requests_error: int = 0
    requests_aborted: int = 0
    requests_replayed: int = 0
    grants_withdrawn: int = 0
    worker_deaths: int = 0
    worker_restarts: int = 0
    protocol_errors: int = 0
    malformed_frames: int = 0
    stale_events: int = 0
    duplicate_chunks: int = 0
    prompt_by_owner: Counter[int] = field(default_factory=Counter)
    cached_by_owner: Counter[int] = field(default_factory=Counter)
    generated_by_owner: Counter[int] = field(default_factory=Counter)
    preempted_by_owner: Counter[int] = field(default_factory=Counter)
    requests_refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)

    def worker_lost(self, kind: LossKind) -> None:
        self.losses[kind.value] += 1
        self.worker_deaths += kind is not LossKind.RESTART

    def ended(self, reason: FinishReason, code: str) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.requests_ok += 1
            case FinishReason.ABORT:
                self.requests_aborted += 1
            case FinishReason.ERROR:
                self.requests_error += 1
                self.errors[code] += 1

    def snapshot(self, *, unknown_frames: int) -> ControllerCounters:
        return ControllerCounters(
            requests_started=self.requests_started,
            requests_ok=self.requests_ok,
            requests_error=self.requests_error,
            requests_aborted=self.requests_aborted,
            requests_refused=MappingProxyType(dict(self.requests_refused)),
            errors=MappingProxyType(dict(self.errors)),
            requests_replayed=self.requests_replayed,
            grants_withdrawn=self.grants_withdrawn,
            requests_preempted=self.preempted_by_owner.total(),
            grants=MappingProxyType(dict(self.grants)),
            prompt_tokens=self.prompt_by_owner.total(),
            cached_tokens=self.cached_by_owner.total(),
            generated_tokens=self.generated_by_owner.total(),
            worker_deaths=self.worker_deaths,
            worker_restarts=self.worker_restarts,
            worker_losses=MappingProxyType(dict(self.losses)),
            protocol_errors=self.protocol_errors,
            malformed_frames=self.malformed_frames,
            stale_events=self.stale_events,
            duplicate_chunks=self.duplicate_chunks,
            unknown_frames=unknown_frames,
        )
