"""Health monitor: checks the ready owners at every tick, and reports those that are lost."""

from collections.abc import Callable, Iterable
from typing import Final, assert_never

from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.workers.actions import STUCK, Loss
from mlx_dp.orchestrator.control.workers.liveness import (
    LivenessLimits,
    LivenessVerdict,
    OwnLag,
    ignores_message,
    judge,
    step_allowance_s,
)
from mlx_dp.orchestrator.control.workers.stalled_rank import stalled_rank
from mlx_dp.orchestrator.worker_states import LossKind


class HealthMonitor:
    """Applies the rules of liveness to all owners, without the time that the controller missed.

    ``lockstep``: all owners wait for each other in every step, so each may take as long as any.
    ``halted`` says whether a worker's process was stopped by a signal.
    """

    def __init__(
        self,
        limits: LivenessLimits,
        ranks: RankTable,
        halted: Callable[[int], bool],
        *,
        lag_tolerance_s: float,
        lockstep: bool,
    ) -> None:
        self._limits: Final = limits
        self._lockstep: Final = lockstep
        self._ranks: Final = ranks
        self._halted: Final = halted
        self._lag: Final = OwnLag(lag_tolerance_s)

    def note_lag(self, now: float, interval_s: float) -> float:
        """Return the seconds that the controller itself missed; exclude them from all deadlines."""
        missed_s = self._lag.note_call(now, interval_s)
        if missed_s:
            for owner in self._ranks.owners():
                owner.extend_deadlines(now, missed_s)
        return missed_s

    def judge_owners(self, now: float) -> list[tuple[int, Loss]]:
        """Mark suspicious and overdue owners; return those that are lost, and why.

        In lockstep, all owners are overdue as soon as one is.
        """
        found: list[tuple[int, Loss]] = []
        owners = self._ranks.owners()
        for owner in owners:
            loss = self._judge(owner, now) or self._ignored_message(owner, now)
            if loss is not None:
                found.append((owner.dp_rank, loss))
        if self._lockstep and any(owner.overdue for owner in owners):
            for owner in owners:
                owner.overdue = True
        return self._stalled(found, now) if self._lockstep else found

    def _stalled(self, found: list[tuple[int, Loss]], now: float) -> list[tuple[int, Loss]]:
        """Of a lockstep group, blame only the rank that the others wait for, if it is known."""
        if not found:
            return found
        heartbeats = {owner.dp_rank: owner.heartbeats for owner in self._ranks.owners()}
        stall = stalled_rank(heartbeats, self._limits, self._halted, now=now)
        if stall is None:
            return found
        kind = dict(found).get(stall.index, found[0][1]).kind
        kind = kind if kind in STUCK else LossKind.HUNG
        reports = "; ".join(f"worker {index}: {loss.detail}" for index, loss in found)
        return [(stall.index, Loss(kind=kind, detail=f"{stall.detail} ({reports})", sole=True))]

    def unaccepted_in_time(self, now: float) -> list[tuple[Owner, Grant]]:
        """The grants that were not accepted in time, by owners that may still be alive."""
        return [
            (owner, grant)
            for owner in self._ranks.owners()
            for grant in owner.unaccepted.values()
            if not grant.withdrawn and now - grant.since > self._limits.accept_timeout_s
        ]

    def _judge(self, owner: Owner, now: float) -> Loss | None:
        heartbeats = owner.heartbeats
        verdict = judge(heartbeats, self._limits, step_s=self._step_allowance_s(owner), now=now)
        silent_s = now - heartbeats.heard_at
        owner.note_silence(suspicious=silent_s > self._limits.suspicious_s)
        owner.overdue = verdict not in (LivenessVerdict.ALIVE, LivenessVerdict.SUSPICIOUS)
        match verdict:
            case LivenessVerdict.ALIVE | LivenessVerdict.SUSPICIOUS | LivenessVerdict.OVERDUE:
                return None
            case LivenessVerdict.HUNG:
                running = 0 if heartbeats.last is None else heartbeats.last.running
                stuck_s = now - heartbeats.progressed_at
                detail = f"no step for {stuck_s:.1f} s with {running} requests running"
                return Loss(kind=LossKind.HUNG, detail=detail)
            case LivenessVerdict.SILENT:
                detail = f"not heard for {silent_s:.1f} s"
                return Loss(kind=LossKind.SILENT, detail=detail)
            case _:
                assert_never(verdict)

    def _step_allowance_s(self, owner: Owner) -> float:
        """The time allowed for the steps of an owner; in lockstep, for those of the slowest."""
        owners = self._ranks.owners() if self._lockstep else (owner,)
        paces = [each.heartbeats.prefill_token_s for each in owners]
        return step_allowance_s(
            self._limits,
            step_tokens=max(each.heartbeats.step_tokens for each in owners),
            prefill_token_s=max((pace for pace in paces if pace is not None), default=None),
            idle_before_step_s=max(each.heartbeats.idle_before_step_s for each in owners),
        )

    def _ignored_message(self, owner: Owner, now: float) -> Loss | None:
        """Return the loss of an owner that ignores a request or an abort, the oldest one first."""
        limits = self._limits
        grant = self._first_ignored(owner, owner.unaccepted.values(), limits.accept_timeout_s, now)
        if grant is not None:
            detail = f"request {grant.request_id} not accepted in {limits.accept_timeout_s:g} s"
            return Loss(kind=LossKind.NOT_ACCEPTED, detail=detail)
        aborted = (grant for grant in owner.aborting.values() if grant.abort_sent)
        grant = self._first_ignored(owner, aborted, limits.release_timeout_s, now)
        if grant is not None:
            detail = f"request {grant.request_id} not aborted in {limits.release_timeout_s:g} s"
            return Loss(kind=LossKind.NOT_RELEASED, detail=detail)
        return None

    @staticmethod
    def _first_ignored(
        owner: Owner, grants: Iterable[Grant], timeout_s: float, now: float
    ) -> Grant | None:
        grant = next(iter(grants), None)
        if grant is None:
            return None
        late = ignores_message(
            owner.heartbeats,
            since=grant.since,
            heartbeats_before=grant.heartbeats_before,
            timeout_s=timeout_s,
            now=now,
        )
        return grant if late else None
