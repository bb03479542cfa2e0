"""Work for responses is spread over runs of the event loop."""

import asyncio

from mlx_dp.orchestrator.http.stream.yield_budget import TURN_UNITS, YieldBudget


def spread(*portions: int) -> list[int]:
    """The work of each loop run when tasks want these portions at once."""

    async def run() -> list[int]:
        budget = YieldBudget()
        done: list[int] = [0]

        async def work(units: int) -> None:
            await budget.spend(units)
            done[-1] += units

        tasks = [asyncio.create_task(work(units)) for units in portions]
        while not all(task.done() for task in tasks):
            done.append(0)
            await asyncio.sleep(0)
        return done

    return [units for units in asyncio.run(run()) if units]


def test_small_portions_are_done_in_one_turn() -> None:
    assert spread(1, 2, 3) == [6]


def test_a_turn_has_no_more_than_twice_its_units_and_all_is_done() -> None:
    found = spread(*[TURN_UNITS // 2] * 9, *[1] * 9)
    assert sum(found) == 9 * (TURN_UNITS // 2) + 9
    assert max(found) <= 2 * TURN_UNITS
    assert len(found) > 3


def test_a_portion_that_is_too_large_has_a_turn_for_itself() -> None:
    assert spread(5 * TURN_UNITS, 5 * TURN_UNITS, 1) == [5 * TURN_UNITS, 5 * TURN_UNITS, 1]


def test_the_longest_wait_goes_first_and_a_cancelled_one_delays_none() -> None:
    async def run() -> list[str]:
        budget = YieldBudget()
        order: list[str] = []

        async def work(name: str, units: int) -> None:
            await budget.spend(units)
            order.append(name)

        first = asyncio.create_task(work("first", TURN_UNITS))
        gone = asyncio.create_task(work("gone", TURN_UNITS))
        large = asyncio.create_task(work("large", TURN_UNITS))
        small = asyncio.create_task(work("small", 1))
        await asyncio.sleep(0)
        assert first.done()
        gone.cancel()
        await asyncio.wait((gone, large, small))
        await work("later", TURN_UNITS)
        return order

    assert asyncio.run(run()) == ["first", "large", "small", "later"]
