"""Coroutines that wait for a predicate over synchronous state."""

import asyncio

from mlx_dp.orchestrator.control.awaitable_predicates import AwaitablePredicates


def test_a_coroutine_wakes_once_its_predicate_is_true() -> None:
    async def run() -> tuple[bool, bool, bool]:
        predicates = AwaitablePredicates()
        done: set[str] = set()
        waiter = asyncio.create_task(predicates.wait(lambda: "it" in done))
        await asyncio.sleep(0)
        predicates.wake()
        await asyncio.sleep(0)
        early = waiter.done()
        done.add("it")
        predicates.wake()
        return early, await waiter, await predicates.wait(lambda: False, 0.001)

    assert asyncio.run(run()) == (False, True, False)
