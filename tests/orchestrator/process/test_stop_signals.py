"""The first signal drains, each further one hurries, and the first decides the status."""

import asyncio
import os
import signal

import pytest

from mlx_dp.orchestrator.process.stop_signals import StopSignals


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
