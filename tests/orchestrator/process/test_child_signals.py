"""Children survive signals that are sent to all processes of a service."""

import signal
import subprocess
import sys

import pytest

from mlx_dp.orchestrator.process.child_signals import stop_signals_blocked

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
