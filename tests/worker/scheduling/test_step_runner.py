"""Requests run, end and free memory on an engine, and their events are sent in order."""

from dataclasses import replace

from mlx_dp.proto.messages.commands import Abort, Flush
from mlx_dp.proto.messages.events import (
    Accepted,
    Finished,
    FinishReason,
    Flushed,
    Prefilled,
    Rejected,
    Tokens,
    Up,
)
from mlx_dp.worker.scheduling.step_runner import StepRunner
from tests.support.worker.worker_bench import Bench, submit


class Running:
    """A runner over the fake engine. ``held_at_end``: requests still held when they finished."""

    def __init__(self, *, slots: int = 2) -> None:
        bench = Bench(slots=slots)
        self.sent: list[Up] = []
        self.held_at_end: list[int] = []
        self.runner = StepRunner(bench.engine, bench.scheduler, self._send)

    def _send(self, message: Up) -> None:
        self.sent.append(message)
        if isinstance(message, Finished) and self.runner.is_running(submit(message.request_id)):
            self.held_at_end.append(message.request_id)

    def step(self) -> None:
        self.runner.make_room()
        self.runner.absorb(self.runner.launch(self.runner.plan(64)))

    def kinds(self) -> list[type[Up]]:
        kinds: list[type[Up]] = [type(message) for message in self.sent]
        self.sent.clear()
        return kinds


def test_a_request_runs_to_its_end_and_is_reported_after_its_slot_is_free() -> None:
    running = Running()
    request = submit(1, max_tokens=2)
    running.runner.submit(request)
    assert running.runner.is_running(request)
    assert (running.runner.busy, running.runner.waiting) == (True, 1)
    while running.runner.busy:
        running.step()
    assert running.kinds() == [Accepted, Prefilled, Tokens, Tokens, Finished]
    assert not running.runner.is_running(request)
    assert running.held_at_end == []


def test_a_request_without_a_slot_is_rejected() -> None:
    running = Running(slots=1)
    running.runner.submit(submit(1))
    running.runner.submit(submit(2))
    assert running.kinds() == [Accepted, Rejected]
    assert not running.runner.is_running(submit(2))


def test_the_same_grant_twice_runs_once() -> None:
    running = Running()
    running.runner.submit(submit(1))
    running.runner.submit(submit(1))
    assert running.kinds() == [Accepted]


def test_a_new_grant_ends_the_earlier_one_first() -> None:
    running = Running(slots=1)
    first = submit(1)
    running.runner.submit(first)
    running.runner.submit(replace(first, epoch=first.epoch + 1))
    accepted, ended, again = running.sent
    assert isinstance(accepted, Accepted) and accepted.epoch == first.epoch
    assert isinstance(ended, Finished) and ended.reason is FinishReason.ABORT
    assert isinstance(again, Accepted) and again.epoch == first.epoch + 1


def test_an_abort_of_an_unknown_request_sends_nothing() -> None:
    running = Running()
    running.runner.abort(Abort(request_id=9, epoch=1))
    assert running.kinds() == []


def test_a_flush_is_answered() -> None:
    running = Running()
    running.runner.flush(Flush(flush_id=3))
    assert running.kinds() == [Flushed]
