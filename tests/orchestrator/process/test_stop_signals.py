"""The first signal drains, each further one hurries, and the first decides the status."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from mlx_dp.orchestrator.process.stop_signals import StopSignals, stop_signals_blocked

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize(("first", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_each_further_signal_hurries_more(first: signal.Signals, status: int) -> None:
    calls: list[tuple[str, int]] = []

    async def scenario() -> StopSignals:
        signals = StopSignals(
            lambda number: calls.append(("hurry", number)),
            lambda number: calls.append(("at once", number)),
        )
        signals.install(asyncio.get_running_loop())
        assert signals.status == 0
        os.kill(os.getpid(), first)
        async with asyncio.timeout(30.0):
            await signals.requested.wait()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            before = len(calls)
            os.kill(os.getpid(), number)
            async with asyncio.timeout(30.0):
                while len(calls) == before:
                    await asyncio.sleep(0)
        return signals

    assert asyncio.run(scenario()).status == status
    assert calls == [
        ("hurry", signal.SIGINT),
        ("at once", signal.SIGTERM),
        ("at once", signal.SIGINT),
    ]


@pytest.mark.system
@pytest.mark.parametrize("number", ALL)
def test_a_child_outlives_the_signal_from_its_first_moment(number: signal.Signals) -> None:
    with stop_signals_blocked():
        child = subprocess.Popen(
            [sys.executable, "-c", "input(); print('alive')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    # It is still being started: there is no moment before.
    child.send_signal(number)
    assert child.communicate(b"\n", timeout=60)[0] == b"alive\n"
    assert child.returncode == 0


def test_what_this_process_gets_meanwhile_it_gets_afterwards() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: got.append(number))
    try:
        with stop_signals_blocked():
            signal.raise_signal(signal.SIGHUP)
            assert got == []
        assert got == [signal.SIGHUP]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.signal(signal.SIGHUP, before)
