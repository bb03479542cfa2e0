"""The worker's loop: receive, admit, run one step, send."""

import logging
from collections.abc import Callable, Iterable
from typing import assert_never

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages import (
    Abort,
    Drain,
    FailureKind,
    Flush,
    Rejected,
    Shutdown,
    Start,
    Submit,
)
from mlx_dp.worker.beats import Beats
from mlx_dp.worker.channel import Channel
from mlx_dp.worker.chunk_budget import ChunkBudget
from mlx_dp.worker.engine import Engine
from mlx_dp.worker.failure import serving_failure
from mlx_dp.worker.held_verbs import HeldVerbs, ShutdownAskedError
from mlx_dp.worker.pulse import Pulse
from mlx_dp.worker.scheduler import Scheduler
from mlx_dp.worker.step_timer import StepTimer

_logger = logging.getLogger(__name__)


class WorkerLoop:
    """Joins channel, scheduler and engine; decides nothing itself.

    Verbs take effect between steps, so an aborted request is gone within one. While the
    controller reads nothing, nothing is generated either: tokens are never dropped, and memory
    stays bounded. Whenever nothing runs here, peers of a group that want a pass get it.
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
        self._channel = HeldVerbs(channel)
        self._engine = engine
        self._scheduler = scheduler
        self._chunk_budget = chunk_budget
        self._pulse = pulse
        self._clock = clock
        self._timer = StepTimer()
        self._beats = Beats(self._channel, engine, scheduler, pulse, clock)
        if engine.peers is not None:
            engine.peers.watch(self._beats)

    def run(self) -> ExitCode:
        """Turn until the controller says stop, or the engine fails."""
        while True:
            try:
                ended = self.turn()
            except ShutdownAskedError:
                return ExitCode.OK
            except Exception as error:
                failed = serving_failure(error)
                # Where this rank was when a peer went is no clue: it did nothing wrong.
                trace = failed.kind is not FailureKind.PEER_LOST
                _logger.error(
                    "step %d failed: %s", self._beats.step, failed.message, exc_info=trace
                )
                self._channel.send(failed)
                return ExitCode[failed.kind.name]
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
            self._beats.rest()
            self._sleep(self._beats.due_in or 0.1)
            return None
        if self._engine.busy or self._scheduler.requests.waiting:
            self._run_step()
            self._beats.if_due()
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
        running = self._scheduler.requests.find(submit.request_id)
        if running is not None and running.submit.epoch == submit.epoch:
            # Refused, it would be over for the controller, which may not know yet that it runs.
            _logger.warning("request %d: the same grant came twice", submit.request_id)
            return
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
        self._beats.begin(self._timer.prefilling + prompt_tokens)
        called_at = self._clock()
        drawn = self._engine.step(plan)
        self._scheduler.launched()
        took = self._timer.returned(
            called_at,
            self._clock(),
            prefilled=prompt_tokens,
            decoded=decoding,
            blocks=self._engine.launch_blocks,
        )
        if took is not None:
            self._beats.took(took)
        self._beats.launched(self._timer.prefilling)
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
        self._beats.rest()
        self._scheduler.rest()
        if self._beats.if_due():
            self._scheduler.check()
        self._sleep(self._beats.due_in)

    def _sleep(self, timeout_s: float) -> None:
        """Wait for something to hear or say, or compute with peers that want to."""
        peers = self._engine.peers
        if peers is None:
            self._channel.wait(timeout_s)
        elif peers.wanted():
            peers.take_part()
        else:
            self._channel.wait(timeout_s, peers.fd)
