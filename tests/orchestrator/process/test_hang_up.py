"""SIGHUP: a restart that is asked for, but the end where a terminal has gone."""

import asyncio
import os
import signal

import pytest

from mlx_dp.orchestrator.process.hang_up import HangUp


@pytest.mark.parametrize(
    ("before", "after", "called"),
    [(True, True, "restart"), (True, False, "end"), (False, False, "restart")],
)
def test_it_ends_only_what_has_lost_its_terminal(before: bool, after: bool, called: str) -> None:
    calls: list[str] = []
    answers = iter([before, after])
    hang_up = HangUp(
        lambda: calls.append("restart"),
        lambda: calls.append("end"),
        is_terminal=lambda _: next(answers),
    )
    hang_up.received()
    assert calls == [called]


def test_a_terminal_that_was_closed_is_told_from_one_that_is_there() -> None:
    keeper, terminal = os.openpty()
    calls: list[str] = []
    hang_up = HangUp(
        lambda: calls.append("restart"), lambda: calls.append("end"), descriptor=terminal
    )
    hang_up.received()
    os.close(keeper)
    hang_up.received()
    os.close(terminal)
    assert calls == ["restart", "end"]


def test_the_signal_reaches_it() -> None:
    async def run() -> None:
        received = asyncio.Event()
        HangUp(received.set, lambda: None, is_terminal=lambda _: False).install(
            asyncio.get_running_loop()
        )
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            await received.wait()

    asyncio.run(run())
