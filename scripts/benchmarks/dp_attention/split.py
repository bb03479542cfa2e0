"""The time of a step in lockstep, split into computing, exchange, and waiting for peers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.dp_attention.group import Ranks, started
from scripts.benchmarks.results.cases import fine_milliseconds
from scripts.benchmarks.results.report import median, table

PROMPT_TOKENS: Final = 32
SMALL_VOCABULARY: Final = 1000
"""Token ids in every model's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One rank's seconds for a step; together they are a traced step."""

    compute_s: float
    exchange_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Untraced steps: seconds per step, and CPU seconds of all processes per step, by rank."""

    step_s: float
    cpu_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Decode steps with ``rows`` on each rank.

    ``alone`` is one process with all rows; the splits are of traced steps, by rank.
    """

    rows: tuple[int, ...]
    alone: Steps
    together: Steps
    splits: tuple[Split, ...]


def split(
    step_s: float, steps: int, waited_s: Sequence[float], took_s: Sequence[Sequence[float]]
) -> tuple[Split, ...]:
    """Split each rank's time: ``waited_s`` before passes, ``took_s`` in each collective.

    The last rank at a collective does not wait there: its time is exchange.
    """
    pure_s = sum(min(each) for each in zip(*took_s, strict=True)) / steps
    splits = []
    for waited, took in zip(waited_s, took_s, strict=True):
        wait_s = waited / steps + sum(took) / steps - pure_s
        splits.append(Split(compute_s=step_s - pure_s - wait_s, exchange_s=pure_s, wait_s=wait_s))
    return tuple(splits)


async def measure_splits(
    model: Path, cases: Sequence[tuple[int, ...]], steps: int, rounds: int
) -> list[Measured]:
    """Measure each case, the group and one process in turns."""
    size = len(cases[0])
    async with started(model, 1) as (alone, _), started(model, size) as (group, _):
        return [await _measure(alone, group, rows, steps, rounds) for rows in cases]


async def _measure(
    alone: Ranks, group: Ranks, rows: tuple[int, ...], steps: int, rounds: int
) -> Measured:
    chance = random.Random(f"{rows}")
    whole = (sum(rows),)
    await _fill(alone, whole, chance)
    await _fill(group, rows, chance)
    one, both, traced = [], [], []
    for _ in range(rounds):
        one.append(await _served(alone, whole, steps))
        both.append(await _served(group, rows, steps))
        traced.append(await _traced(group, rows, steps))
    measured = Measured(
        rows=rows,
        alone=_medians(one),
        together=_medians(both),
        splits=tuple(_median_split(each) for each in zip(*traced, strict=True)),
    )
    for ranks in (alone, group):
        # Sent separately: each rank takes part in passes until the others have finished.
        for rank in range(ranks.size):
            await ranks.order(rank, do="clear")
    return measured


async def _served(ranks: Ranks, rows: Sequence[int], steps: int) -> Steps:
    await _all(ranks, do="begin", trace=False)
    step_s = await _steps(ranks, rows, steps)
    told = await _all(ranks, do="end")
    return Steps(step_s=step_s[0], cpu_s=tuple(answer["cpu_s"] / steps for answer in told))


async def _traced(group: Ranks, rows: Sequence[int], steps: int) -> tuple[Split, ...]:
    await _all(group, do="begin", trace=True)
    step_s = await _steps(group, rows, steps)
    told = await _all(group, do="end")
    waited_s = [answer["waited_s"] for answer in told]
    return split(max(step_s), steps, waited_s, [answer["collectives_s"] for answer in told])


def _medians(runs: Sequence[Steps]) -> Steps:
    by_rank = zip(*[run.cpu_s for run in runs], strict=True)
    return Steps(
        step_s=median([run.step_s for run in runs]),
        cpu_s=tuple(median(each) for each in by_rank),
    )


async def _fill(ranks: Ranks, rows: Sequence[int], chance: random.Random) -> None:
    prompts = [
        [[chance.randrange(SMALL_VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        for count in rows
    ]
    await ranks.order_all([{"do": "fill", "prompts": mine} if mine else None for mine in prompts])


async def _steps(ranks: Ranks, rows: Sequence[int], steps: int) -> list[float]:
    """Seconds per step on each rank that has rows."""
    orders = [{"do": "steps", "count": steps} if count else None for count in rows]
    return [answer["step_s"] for answer in await ranks.order_all(orders)]


async def _all(ranks: Ranks, **order: Any) -> list[Any]:
    return await ranks.order_all([order] * ranks.size)


def _median_split(splits: Sequence[Split]) -> Split:
    return Split(
        compute_s=median([each.compute_s for each in splits]),
        exchange_s=median([each.exchange_s for each in splits]),
        wait_s=median([each.wait_s for each in splits]),
    )


def split_table(measured: Sequence[Measured]) -> str:
    """The three times are of traced steps, which overlap with nothing."""
    headers = ["rows", "one process", "its CPU", "in lockstep", "ratio"]
    headers += ["rank", "CPU", "compute", "exchange", "wait"]
    lines = []
    for case in measured:
        whole = [
            " + ".join(str(count) for count in case.rows),
            fine_milliseconds(case.alone.step_s),
            fine_milliseconds(case.alone.cpu_s[0]),
            fine_milliseconds(case.together.step_s),
            f"{case.together.step_s / case.alone.step_s:.2f}x",
        ]
        for rank, part in enumerate(case.splits):
            times = [case.together.cpu_s[rank], part.compute_s, part.exchange_s, part.wait_s]
            cells = [str(rank), *[fine_milliseconds(seconds) for seconds in times]]
            lines.append([*(whole if rank == 0 else [""] * len(whole)), *cells])
    return table(headers, lines)
