"""Signals to every process of a service, in every order, and Ctrl-C at every moment."""

import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.hosts.served import COMMAND, Served, alive, wait_until

pytestmark = pytest.mark.system

SLOW = ("--engine", "fake", "--fake-decode-rate", "50", "--dp-size", "2")


class Streams:
    """Streams on both owners, each in a thread, with their events."""

    def __init__(self, served: Served, tokens: int) -> None:
        self.events: list[list[str]] = [[], []]
        self._served = served
        self._begun = [threading.Event(), threading.Event()]
        self._threads = [
            threading.Thread(target=self._run, args=(rank, tokens), daemon=True) for rank in (0, 1)
        ]
        for thread in self._threads:
            thread.start()
        for begun in self._begun:
            assert begun.wait(60.0)
        assert all(self.events), self.events

    def _run(self, rank: int, tokens: int) -> None:
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "routed_dp_rank": rank}
        try:
            for event in self._served.stream(body):
                self.events[rank].append(event)
                self._begun[rank].set()
        except OSError as error:
            self.events[rank].append(f"broken: {error}")
        self._begun[rank].set()

    def ended(self) -> list[list[str]]:
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a stream never ended"
        return self.events


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(*SLOW) as made:
        made.wait_until_ready()
        yield made


@pytest.mark.parametrize(
    ("number", "order"),
    [
        pytest.param(signal.SIGTERM, (0, 1, 2), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, (2, 1, 0), marks=pytest.mark.slow),
        (signal.SIGTERM, (1, 0, 2)),
        (signal.SIGINT, (1, 2, 0)),
    ],
    ids=str,
)
def test_streams_drain_to_their_end_in_any_order_of_signals(
    served: Served, number: signal.Signals, order: tuple[int, ...]
) -> None:
    streams = Streams(served, 60)
    workers = served.workers()
    assert len(workers) == 2
    pids = [served.process.pid, *(worker.pid for worker in workers)]
    for place in order:
        os.kill(pids[place], number)
    for events in streams.ended():
        assert events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert not any("error" in event for event in events)
    assert served.exit_status() == (0 if number is signal.SIGTERM else 130)
    assert not any(map(alive, workers))
    assert not any("lost" in line for line in served.lines)


@pytest.mark.slow
@pytest.mark.parametrize("order", [*itertools.permutations((0, 1, 2))], ids=str)
def test_a_hang_up_to_workers_is_not_for_them(served: Served, order: tuple[int, ...]) -> None:
    """As systemd's SendSIGHUP= does it, right behind SIGTERM."""
    streams = Streams(served, 60)
    workers = served.workers()
    pids = [served.process.pid, *(worker.pid for worker in workers)]
    for place in order:
        os.kill(pids[place], signal.SIGTERM)
        os.kill(pids[place], signal.SIGHUP)
    assert all(events[-1] == "[DONE]" for events in streams.ended())
    assert served.exit_status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_load_ends_it_cleanly_and_soon(number: signal.Signals) -> None:
    with Served("--engine", "fake", "--fake-load-time", "300") as served:
        served.wait_for_line("worker 0: started")
        (worker,) = served.workers()
        worker.send_signal(number)
        served.signal(number)
        assert served.exit_status(100.0) == (0 if number is signal.SIGTERM else 130)
        assert not alive(worker)


def test_a_second_ctrl_c_ends_streams_with_an_error_event(served: Served) -> None:
    streams = Streams(served, 5_000)
    workers = served.workers()
    served.signal(signal.SIGINT)
    served.wait_for_line("draining 2 requests")
    served.signal(signal.SIGINT)
    for events in streams.ended():
        *_, error, done = events
        assert "shutting_down" in error
        assert done == "[DONE]"
    assert served.exit_status(60.0) == 130
    wait_until(lambda: not any(map(alive, workers)), "its workers are gone")


def test_a_worker_that_is_stopped_does_not_hold_up_a_second_signal(served: Served) -> None:
    streams = Streams(served, 5_000)
    workers = served.workers()
    workers[0].suspend()
    served.signal(signal.SIGTERM)
    served.wait_for_line("draining 2 requests")
    served.signal(signal.SIGTERM)
    assert all(events[-1] == "[DONE]" for events in streams.ended())
    assert served.exit_status(60.0) == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(alive, workers)), "its workers are gone")


# The modules that the program imports report it, and then wait.
INTERRUPTED_IMPORT = """
import builtins, sys
name = sys.argv.pop(1)
real = builtins.__import__
def wait(wanted, *rest, **more):
    if wanted == name:
        print("importing", flush=True)
        sys.stdin.read()
    return real(wanted, *rest, **more)
builtins.__import__ = wait
from mlx_dp.orchestrator.cli.entry import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "uvicorn"])
def test_ctrl_c_during_the_imports_is_one_line_and_its_status(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, *COMMAND[3:], "--engine", "fake"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 130
        assert process.stderr.read() == "mlx-dp: interrupted\n"


def test_ctrl_c_is_one_line_without_a_reader() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while select.select([], [writing], [], 0)[1]:
        os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "typer", *COMMAND[3:]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 130
    os.close(reading)
    os.close(writing)
