"""The worker's loop: receive, admit, run one step, send."""

import logging
from collections.abc import Callable
from typing import assert_never

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Abort, Drain, Flush, Shutdown, Start, Submit
from mlx_dp.proto.messages.events import FailureKind
from mlx_dp.worker.channel import BufferedChannel, Channel, ShutdownRequestedError
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.contract.failure import serving_failure
from mlx_dp.worker.heartbeat import HeartbeatSchedule, LoopHeartbeats
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.scheduling.step_runner import StepRunner
from mlx_dp.worker.scheduling.step_timer import StepTimer

_logger = logging.getLogger(__name__)


class WorkerLoop:
    """Connects channel, scheduler and engine. It makes no decisions.

    Commands take effect between steps, so an aborted request ends within one step. While the
    controller does not read, no tokens are generated: so none are dropped, and memory stays
    bounded. While idle, the worker takes part in the passes of its peers.
    """

    def __init__(
        self,
        channel: Channel,
        engine: Engine,
        scheduler: Scheduler,
        chunk_budget: ChunkBudget,
        heartbeats: HeartbeatSchedule,
        clock: Callable[[], float],
    ) -> None:
        self._channel = BufferedChannel(channel)
        self._engine = engine
        self._scheduler = scheduler
        self._chunk_budget = chunk_budget
        self._schedule = heartbeats
        self._clock = clock
        self._timer = StepTimer()
        self._runner = StepRunner(engine, scheduler, self._channel.send)
        self._heartbeats = LoopHeartbeats(self._channel, engine, scheduler, heartbeats, clock)
        if engine.peers is not None:
            engine.peers.watch(self._heartbeats)

    def run(self) -> ExitCode:
        """Run until the controller sends Shutdown, or the engine fails."""
        while True:
            try:
                ended = self.run_once()
            except ShutdownRequestedError:
                return ExitCode.OK
            except Exception as error:
                failed = serving_failure(error)
                # This rank is not at fault, so its stack explains nothing.
                trace = failed.kind is not FailureKind.PEER_LOST
                _logger.error(
                    "step %d failed: %s", self._heartbeats.step, failed.message, exc_info=trace
                )
                self._channel.send(failed)
                return ExitCode[failed.kind.name]
            if ended is not None:
                return ended

    def run_once(self) -> ExitCode | None:
        """Receive, run one step or wait, and send. Returns an exit code if the worker must end."""
        for message in self._channel.drain():
            if isinstance(message, Shutdown):
                return ExitCode.OK
            self._handle(message)
        if self._channel.congested:
            self._timer.idle()
            self._heartbeats.idle()
            self._sleep(self._heartbeats.due_in or 0.1)
            return None
        if self._runner.busy:
            self._run_step()
            self._heartbeats.send_if_due()
            return None
        self._idle()
        return None

    def _handle(self, message: Submit | Abort | Flush | Drain | Start) -> None:
        match message:
            case Submit():
                self._runner.submit(message)
            case Abort():
                self._runner.abort(message)
            case Flush():
                self._runner.flush(message)
            case Drain():
                self._scheduler.drain()
                self._schedule.make_due()
            case Start():
                _logger.warning("ignored a second Start")
            case _:
                assert_never(message)

    def _run_step(self) -> None:
        self._runner.make_room()
        decoding = self._scheduler.requests.decoding
        budget = self._chunk_budget.tokens(
            decoding=decoding, waiting=self._scheduler.requests.waiting
        )
        plan = self._runner.plan(budget)
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.prefill)
        self._heartbeats.begin_step(self._timer.prefilling + prompt_tokens)
        called_at = self._clock()
        drawn = self._runner.launch(plan)
        took = self._timer.returned(
            called_at,
            self._clock(),
            prefilled=prompt_tokens,
            decoded=decoding,
            blocks=self._engine.launch_blocks,
        )
        if took is not None:
            self._heartbeats.measured(took)
        self._heartbeats.launched(self._timer.prefilling)
        if took is not None:
            self._chunk_budget.observe(
                took.duration_s, prefilled=took.prefilled, decoded=took.decoded
            )
        self._runner.absorb(drawn)

    def _idle(self) -> None:
        """Sleep until a message arrives or a heartbeat is due."""
        self._timer.idle()
        self._heartbeats.idle()
        self._scheduler.idle()
        if self._heartbeats.send_if_due():
            self._scheduler.check()
        self._sleep(self._heartbeats.due_in)

    def _sleep(self, timeout_s: float) -> None:
        """Wait for a message or the timeout, or take part in a pass of the peers."""
        peers = self._engine.peers
        if peers is None:
            self._channel.wait(timeout_s)
        elif peers.poll_wanted():
            peers.take_part()
        else:
            self._channel.wait(timeout_s, peers.fd)
