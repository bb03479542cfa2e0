"""The worker's loop: receive, admit, run one step, send."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages import (
    Abort,
    Down,
    Drain,
    Failed,
    FailureKind,
    Flush,
    Rejected,
    Shutdown,
    Start,
    Submit,
    Up,
)
from mlx_dp.worker.chunk_budget import ChunkBudget
from mlx_dp.worker.engine import Engine
from mlx_dp.worker.failure import sentence
from mlx_dp.worker.pulse import Moment, Pulse
from mlx_dp.worker.scheduler import Scheduler
from mlx_dp.worker.step_timer import StepTimer

_logger = logging.getLogger(__name__)


class Channel(Protocol):
    """What start-up and loop need of the wire."""

    @property
    def congested(self) -> bool:
        """The controller does not read, and frames wait for it."""

    @property
    def malformed_frames(self) -> int:
        """Frames from the controller that were dropped, since they broke the protocol."""

    def send(self, message: Up) -> None: ...

    def drain(self) -> list[Down]: ...

    def wait(self, timeout_s: float) -> bool: ...


class WorkerLoop:
    """Joins channel, scheduler and engine; decides nothing itself.

    Verbs take effect between steps, so an aborted request is gone within one. While the
    controller reads nothing, nothing is generated either: tokens are never dropped, and memory
    stays bounded.
    """

    def __init__(
        self,
        channel: Channel,
        engine: Engine,
        scheduler: Scheduler,
        chunk_budget: ChunkBudget,
        pulse: Pulse,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._scheduler = scheduler
        self._chunk_budget = chunk_budget
        self._pulse = pulse
        self._clock = clock
        self._timer = StepTimer()
        self._step = 0

    def run(self) -> ExitCode:
        """Turn until the controller says stop, or the engine fails."""
        while True:
            try:
                ended = self.turn()
            except Exception as error:
                _logger.exception("step %d failed", self._step)
                self._channel.send(Failed(kind=FailureKind.INTERNAL, message=sentence(error)))
                return ExitCode.INTERNAL
            if ended is not None:
                return ended

    def turn(self) -> ExitCode | None:
        """Go round once: return the exit code when that was the last time."""
        for message in self._channel.drain():
            if isinstance(message, Shutdown):
                return ExitCode.OK
            self._obey(message)
        if self._channel.congested:
            self._timer.idle()
            self._channel.wait(self._pulse.due_in(self._clock()) or 0.1)
            return None
        if self._engine.busy or self._scheduler.requests.waiting:
            self._run_step()
            self._beat_if_due()
            return None
        self._rest()
        return None

    def _obey(self, message: Submit | Abort | Flush | Drain | Start) -> None:
        match message:
            case Submit():
                self._admit(message)
            case Abort():
                self._abort(message)
            case Flush():
                self._channel.send(self._scheduler.flush(message))
            case Drain():
                self._scheduler.drain()
                self._pulse.hasten()
            case Start():
                _logger.warning("ignored a second Start")
            case _:
                assert_never(message)

    def _abort(self, abort: Abort) -> None:
        slot = self._scheduler.abort(abort)
        if slot is not None:
            self._end((slot,))

    def _admit(self, submit: Submit) -> None:
        # A request that is granted anew has been given up in its earlier grants, whose abort may
        # not have come through.
        self._abort(Abort(request_id=submit.request_id, epoch=submit.epoch - 1))
        admitted = self._scheduler.submit(submit)
        if isinstance(admitted, Rejected):
            self._channel.send(admitted)
            return
        self._engine.add(admitted.lease.slot, admitted.engine_request)
        self._channel.send(admitted.accepted)

    def _run_step(self) -> None:
        self._preempt()
        decoding = self._scheduler.requests.decoding
        budget = self._chunk_budget.tokens(
            decoding=decoding, waiting=self._scheduler.requests.waiting
        )
        plan = self._scheduler.plan(budget)
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.prefill)
        # The controller has to hear of it before: no beat leaves while the device computes.
        under_way = self._timer.prefilling + prompt_tokens
        if not self._pulse.tells(under_way):
            self._beat(self._clock(), step_tokens=under_way)
        called_at = self._clock()
        drawn = self._engine.step(plan)
        self._scheduler.launched()
        self._step += 1
        took = self._timer.returned(
            called_at,
            self._clock(),
            prefilled=prompt_tokens,
            decoded=decoding,
        )
        if took is not None:
            self._chunk_budget.observe(
                took.duration_s, prefilled=took.prefilled, decoded=took.decoded
            )
        outcome = self._scheduler.absorb(drawn)
        for prefilled in outcome.prefilled:
            self._channel.send(prefilled)
        if outcome.tokens is not None:
            self._channel.send(outcome.tokens)
        for slot in outcome.spent_slots:
            self._keep(slot)
        self._end(outcome.finished_slots)

    def _keep(self, slot: int) -> None:
        kept = self._scheduler.keep(slot)
        if kept is not None:
            self._engine.keep(slot, kept.saves, kept.snapshot)

    def _end(self, slots: Iterable[int]) -> None:
        """Let go of finished requests; each is reported once nothing of it is left here."""
        for slot in slots:
            self._keep(slot)
            self._engine.remove(slot)
            self._channel.send(self._scheduler.release(slot))

    def _preempt(self) -> None:
        """Let go of requests until the next step has room."""
        while (slot := self._scheduler.victim()) is not None:
            self._engine.remove(slot)
            self._channel.send(self._scheduler.preempt(slot))

    def _rest(self) -> None:
        """Nothing runs: sleep until there is something to hear or say."""
        self._timer.idle()
        self._scheduler.rest()
        if self._beat_if_due():
            self._scheduler.check()
        self._channel.wait(self._pulse.due_in(self._clock()))

    def _beat_if_due(self) -> bool:
        now = self._clock()
        if self._pulse.due_in(now) > 0.0:
            return False
        self._beat(now, step_tokens=self._timer.prefilling)
        return True

    def _beat(self, now: float, *, step_tokens: int) -> None:
        moment = Moment(
            step=self._step,
            step_tokens=step_tokens,
            malformed_frames=self._channel.malformed_frames,
        )
        beat = self._pulse.beat(now, moment, scheduler=self._scheduler, engine=self._engine)
        self._channel.send(beat)
