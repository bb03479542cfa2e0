"""Judges the ready owners, over and over, and says which of them are lost."""

from collections.abc import Callable, Iterable
from typing import Final, assert_never

from mlx_dp.orchestrator.control.liveness import (
    LivenessLimits,
    OwnLag,
    Verdict,
    judge,
    overdue,
    step_allowance_s,
)
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.stalled_rank import stalled_rank
from mlx_dp.orchestrator.control.supervisor_steps import STUCK, Loss, LossKind


class HealthWatch:
    """Applies the rules of liveness to the book, and forgives whatever was missed by us.

    ``lockstep``: all owners wait for each other in every step, so each may take as long as any.
    ``halted`` says whether a worker's process was stopped by a signal.
    """

    def __init__(
        self,
        limits: LivenessLimits,
        book: OwnerBook,
        halted: Callable[[int], bool],
        *,
        lag_tolerance_s: float,
        lockstep: bool,
    ) -> None:
        self._limits: Final = limits
        self._lockstep: Final = lockstep
        self._book: Final = book
        self._halted: Final = halted
        self._lag: Final = OwnLag(lag_tolerance_s)

    def slept(self, now: float, interval_s: float) -> float:
        """Seconds that the controller itself missed; nobody is judged by them."""
        missed_s = self._lag.slept(now, interval_s)
        if missed_s:
            for owner in self._book.owners():
                owner.forgive(now, missed_s)
        return missed_s

    def losses(self, now: float) -> list[tuple[int, Loss]]:
        """The owners that have to be given up, and why. Marks those that are suspicious or overdue.

        Where all owners wait for each other, all are overdue as soon as one is.
        """
        found: list[tuple[int, Loss]] = []
        owners = self._book.owners()
        for owner in owners:
            loss = self._judge(owner, now) or self._ignored(owner, now)
            if loss is not None:
                found.append((owner.index, loss))
        if self._lockstep and any(owner.overdue for owner in owners):
            for owner in owners:
                owner.overdue = True
        return self._stalled(found, now) if self._lockstep else found

    def _stalled(self, found: list[tuple[int, Loss]], now: float) -> list[tuple[int, Loss]]:
        """Of a group, put the one first that the others wait for, if it is known."""
        if not found:
            return found
        pulses = {owner.index: owner.pulse for owner in self._book.owners()}
        stall = stalled_rank(pulses, self._limits, self._halted, now=now)
        if stall is None:
            return found
        kind = dict(found).get(stall.index, found[0][1]).kind
        kind = kind if kind in STUCK else LossKind.HUNG
        told = "; ".join(f"worker {index}: {loss.detail}" for index, loss in found)
        return [(stall.index, Loss(kind=kind, detail=f"{stall.detail} ({told})", sole=True))]

    def unanswered(self, now: float) -> list[tuple[Owner, Lease]]:
        """The grants that were not accepted in time, by owners that may yet turn out to live."""
        return [
            (owner, lease)
            for owner in self._book.owners()
            for lease in owner.unaccepted.values()
            if not lease.withdrawn and now - lease.since > self._limits.accept_timeout_s
        ]

    def _judge(self, owner: Owner, now: float) -> Loss | None:
        pulse = owner.pulse
        verdict = judge(pulse, self._limits, step_s=self._step_allowance_s(owner), now=now)
        silent_s = now - pulse.heard_at
        owner.suspicious = silent_s > self._limits.suspicious_s
        owner.overdue = verdict not in (Verdict.ALIVE, Verdict.SUSPICIOUS)
        match verdict:
            case Verdict.ALIVE | Verdict.SUSPICIOUS | Verdict.OVERDUE:
                return None
            case Verdict.HUNG:
                running = 0 if pulse.last is None else pulse.last.running
                stuck_s = now - pulse.moved_at
                detail = f"no step for {stuck_s:.1f} s with {running} requests running"
                return Loss(kind=LossKind.HUNG, detail=detail)
            case Verdict.SILENT:
                detail = f"not heard for {silent_s:.1f} s"
                return Loss(kind=LossKind.SILENT, detail=detail)
            case _:
                assert_never(verdict)

    def _step_allowance_s(self, owner: Owner) -> float:
        """What the steps of an owner may take; in lockstep, what those of the slowest may."""
        owners = self._book.owners() if self._lockstep else (owner,)
        paces = [each.pulse.prefill_token_s for each in owners]
        return step_allowance_s(
            self._limits,
            step_tokens=max(each.pulse.step_tokens for each in owners),
            prefill_token_s=max((pace for pace in paces if pace is not None), default=None),
            rested_s=max(each.pulse.rested_s for each in owners),
        )

    def _ignored(self, owner: Owner, now: float) -> Loss | None:
        """Whether it ignores a request, or does not let go of one. The oldest comes first."""
        limits = self._limits
        lease = self._overdue(owner, owner.unaccepted.values(), limits.accept_timeout_s, now)
        if lease is not None:
            detail = f"request {lease.request_id} not accepted in {limits.accept_timeout_s:g} s"
            return Loss(kind=LossKind.NOT_ACCEPTED, detail=detail)
        told = (lease for lease in owner.leaving.values() if lease.abort_sent)
        lease = self._overdue(owner, told, limits.release_timeout_s, now)
        if lease is not None:
            detail = f"request {lease.request_id} not let go in {limits.release_timeout_s:g} s"
            return Loss(kind=LossKind.NOT_RELEASED, detail=detail)
        return None

    @staticmethod
    def _overdue(
        owner: Owner, leases: Iterable[Lease], timeout_s: float, now: float
    ) -> Lease | None:
        lease = next(iter(leases), None)
        if lease is None:
            return None
        late = overdue(
            owner.pulse, since=lease.since, beats=lease.beats, timeout_s=timeout_s, now=now
        )
        return lease if late else None
