"""Looking after the workers' endpoint while the service runs."""

import asyncio
import logging

import pytest

from mlx_dp.orchestrator.process.endpoint_upkeep import endpoint_kept


def test_a_failure_is_told_once_and_again_after_a_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = iter(["taken", "taken", "", "taken"])

    async def scenario() -> None:
        over = asyncio.Event()

        def keep() -> None:
            failure = next(failures, None)
            if failure is None:
                over.set()
            if failure:
                raise OSError(failure)

        async with asyncio.timeout(200.0), endpoint_kept(keep, interval_s=0.0):
            await over.wait()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.messages == ["taken; no worker can be started until it is back"] * 2


def test_it_ends_with_the_service() -> None:
    async def scenario() -> None:
        async with endpoint_kept(lambda: None):
            assert len(asyncio.all_tasks()) == 2
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
