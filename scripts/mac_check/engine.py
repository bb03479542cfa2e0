"""Measurements of a worker's engine while it serves."""

import random
import time
from pathlib import Path

import mlx.core as mx

from mlx_dp.proto.capacity.ownership import Limits
from scripts.benchmarks.engine.models import write_hybrid
from scripts.benchmarks.engine.side import fill, step_until
from scripts.benchmarks.engine.worker import LocalWorker, OurBatch, start_message
from scripts.benchmarks.results.report import median
from scripts.mac_check.report import Line, Part, Verdict, judged
from scripts.mac_check.sizes import Sizes

MEMORY_NBYTES = 4 * 2**30
AIM = 2.5
"""The allowed time of a step with prompts, in steps without."""
FIRST_STEP_S = 1.0
LOOKS = 4
ANSWER = 2_000
"""Response length, more than is measured."""


def worker_of(folder: Path, sizes: Sizes, slots: int) -> OurBatch:
    directory = write_hybrid(folder / "model", sizes.config)
    limits = Limits(max_running_requests=slots, max_total_tokens=200_000)
    return OurBatch(
        LocalWorker(
            start_message(
                directory, limits, chunk=2048, memory_nbytes=MEMORY_NBYTES, prefix_cache=True
            )
        )
    )


def prompt_of(name: str, length: int) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(2048) for _ in range(length)]


def buffers(folder: Path, sizes: Sizes) -> Part:
    """Serve short requests without common prefixes, and count the buffers that remain."""
    side = worker_of(folder, sizes, slots=4)
    engine = side.worker.engine
    limit = engine.facts.buffer_limit
    lines = [
        Line(
            name="buffers allowed per process (resource_limit)",
            value=str(mx.device_info().get("resource_limit", "not counted here")),
            good="499000 on Macs so far; a worker holds half of it at most",
        )
    ]
    served, start = 0, engine.held_buffers
    for look in range(1, LOOKS + 1):
        while served < sizes.requests * look // LOOKS:
            request = side.submit(prompt_of(f"buffers {served}", 12), 2)
            step_until(side, [request], tokens=2)
            served += 1
        held = engine.held_buffers
        bad = limit is not None and held > limit
        lines.append(
            Line(
                name=f"buffers held after {served} short requests, {engine.held_nbytes >> 20} MiB",
                value=f"{held}, MLX active {mx.get_active_memory() >> 20} MiB",
                good="grows by a few a request"
                + (f", and never beyond {limit}" if limit else "; nothing counts them here"),
                verdict=Verdict.BAD if bad else Verdict.GOOD,
            )
        )
    grown = (engine.held_buffers - start) / served
    lines.append(judged("more buffers a request", grown, most=4.0, why="segments are packed"))
    return Part(name="buffers", lines=tuple(lines))


def launches(folder: Path, sizes: Sizes) -> Part:
    """Decode rows, let a long prompt join, and measure the steps that have its chunks."""
    side = worker_of(folder, sizes, slots=8)
    fill(side, [prompt_of(f"row {row}", 40) for row in range(4)], ANSWER)
    waits: list[bool] = []
    decode = [step_s(side, waits) for _ in range(sizes.steps)]
    decode_waits = sum(waits)
    waits.clear()
    joins = side.submit(prompt_of("joins", sizes.prompt), 4)
    prompt = joining_s(side, joins, waits)
    one = median(decode)
    ratios = [taken / one for taken in prompt]
    over = sum(ratio > AIM * 1.2 for ratio in ratios)
    return Part(
        name="launches",
        lines=(
            unjudged("decode step of 4 rows", f"{one * 1e3:.2f} ms"),
            unjudged("decode steps whose launch waited", f"{decode_waits} of {len(decode)}"),
            unjudged("steps with a prompt whose launch waited", f"{sum(waits)} of {len(waits)}"),
            judged(
                "median step with a prompt, in decode steps",
                median(ratios),
                most=AIM * 1.2,
                why=f"running streams slow down by no more than {AIM}",
            ),
            judged("such steps that took longer", over / len(ratios), most=0.2, why="a few may"),
            unjudged("the longest of them, in decode steps", f"{max(ratios):.1f}"),
        ),
    )


def step_s(side: OurBatch, waits: list[bool]) -> float:
    begun = time.perf_counter()
    side.step()
    waits.append(side.worker.engine.launch_blocks)
    return time.perf_counter() - begun


def joining_s(side: OurBatch, request: int, waits: list[bool]) -> list[float]:
    """The time of each step until the request has its first token."""
    taken: list[float] = []
    while True:
        begun = time.perf_counter()
        emitted = side.step()
        taken.append(time.perf_counter() - begun)
        waits.append(side.worker.engine.launch_blocks)
        if any(one.request == request for one in emitted):
            return taken


def unjudged(name: str, value: str) -> Line:
    return Line(name=name, value=value, good="for comparison")


def first_steps(folder: Path, sizes: Sizes) -> Part:
    """First steps of each number of rows after the warm-up, and the first one after idle time."""
    begun = time.perf_counter()
    side = worker_of(folder, sizes, slots=max(sizes.rows))
    lines = [unjudged("load and warm-up", f"{time.perf_counter() - begun:.1f} s")]
    for rows in sizes.rows:
        fresh = [side.submit(prompt_of(f"{rows}/{row}", 20), ANSWER) for row in range(rows)]
        begun = time.perf_counter()
        step_until(side, fresh, tokens=1)
        first = time.perf_counter() - begun
        usual = median([step_s(side, []) for _ in range(sizes.steps)])
        lines.append(
            judged(
                f"first token of {rows} rows (a decode step then: {usual * 1e3:.2f} ms)",
                first,
                most=FIRST_STEP_S,
                unit=" s",
                why="the warm-up has compiled every kernel",
            )
        )
        if rows != max(sizes.rows):
            side.clear()
    time.sleep(sizes.idle_s)
    lines.append(
        judged(
            f"first step after {sizes.idle_s:g} s in which nothing ran",
            step_s(side, []),
            most=FIRST_STEP_S,
            unit=" s",
            why="idle pages come back before the hang time-out",
        )
    )
    return Part(name="first-steps", lines=tuple(lines))
