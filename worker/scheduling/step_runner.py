"""Runs requests on an engine as the scheduler plans, and reports their events."""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from mlx_dp.proto.messages.commands import Abort, Flush, Submit
from mlx_dp.proto.messages.events import Rejected, Up
from mlx_dp.worker.contract.engine import Drawn, Engine, StepPlan
from mlx_dp.worker.scheduling.scheduler import Scheduler

_logger = logging.getLogger(__name__)


class StepRunner:
    """Calls scheduler and engine in the right order for each step of a request's life.

    It has no channel and no clock: the worker's loop and the warm-up both use it.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, send: Callable[[Up], None]) -> None:
        self._engine: Final = engine
        self._scheduler: Final = scheduler
        self._send: Final = send

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return self._engine.busy or self.waiting > 0

    @property
    def waiting(self) -> int:
        """The number of requests with prompt tokens left to compute."""
        return self._scheduler.requests.waiting

    def is_running(self, submit: Submit) -> bool:
        """Whether a request holds a slot."""
        return self._scheduler.requests.find(submit.request_id) is not None

    def submit(self, submit: Submit) -> None:
        """Accept a request, or reject it."""
        running = self._scheduler.requests.find(submit.request_id)
        if running is not None and running.submit.epoch == submit.epoch:
            # A rejection would end the request, and the controller may not know yet that it runs.
            _logger.warning("request %d: received the same grant twice", submit.request_id)
            return
        # A new grant ends earlier grants of the request: their abort may have been lost.
        self.abort(Abort(request_id=submit.request_id, epoch=submit.epoch - 1))
        admitted = self._scheduler.submit(submit)
        if isinstance(admitted, Rejected):
            self._send(admitted)
            return
        self._engine.add(admitted.lease.slot, admitted.engine_request)
        self._send(admitted.accepted)

    def abort(self, abort: Abort) -> None:
        """End a request if it runs here."""
        slot = self._scheduler.abort(abort)
        if slot is not None:
            self._end((slot,))

    def flush(self, flush: Flush) -> None:
        """Drop the cached prefixes."""
        self._send(self._scheduler.flush(flush))

    def make_room(self) -> None:
        """Preempt requests until the next step fits into memory."""
        while (slot := self._scheduler.victim()) is not None:
            self._engine.remove(slot)
            self._send(self._scheduler.preempt(slot))

    def plan(self, budget: int) -> StepPlan:
        """Plan the next step, with up to ``budget`` prompt tokens. ``make_room()`` comes first."""
        return self._scheduler.plan(budget)

    def launch(self, plan: StepPlan) -> tuple[Drawn, ...]:
        """Launch the planned step; return the tokens of the step before."""
        drawn = self._engine.step(plan)
        self._scheduler.launched()
        return drawn

    def absorb(self, drawn: tuple[Drawn, ...]) -> None:
        """Report a step's tokens, and end the requests that they finish."""
        outcome = self._scheduler.absorb(drawn)
        for prefilled in outcome.prefilled:
            self._send(prefilled)
        if outcome.tokens is not None:
            self._send(outcome.tokens)
        for slot in outcome.spent_slots:
            self._save(slot)
        self._end(outcome.finished_slots)

    def _save(self, slot: int) -> None:
        ended = self._scheduler.take_saves(slot)
        if ended is not None:
            self._engine.save_prefix(slot, ended.saves, ended.snapshot)

    def _end(self, slots: Iterable[int]) -> None:
        """Release finished requests. Each end is reported after its slot is free."""
        for slot in slots:
            self._save(slot)
            self._engine.remove(slot)
            self._send(self._scheduler.release(slot))
