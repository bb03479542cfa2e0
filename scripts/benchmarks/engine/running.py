"""The effect of prompts on running requests, and the real memory of a batch."""

import time
from collections.abc import Sequence

import mlx.core as mx

from scripts.benchmarks.engine.decode import churn_requests
from scripts.benchmarks.engine.side import PATIENCE_STEPS, Emitted, Pair, Side, fill
from scripts.benchmarks.engine.sizes import Sizes
from scripts.benchmarks.engine.worker import OurBatch
from scripts.benchmarks.results.cases import Case, Goal, Section
from scripts.benchmarks.results.report import mebibytes, milliseconds, quantile

PACE = Goal(at_most=2.5)
ACCOUNTED = Goal(at_most=1.1)
MEMORY_ROUNDS = 2
"""Few rounds: bytes vary little, and a round is long."""


class Gaps:
    """Times between the tokens of some requests."""

    def __init__(self, requests: Sequence[int]) -> None:
        self._last: dict[int, float | None] = dict.fromkeys(requests)
        self.seen: list[float] = []

    def add(self, tokens: Sequence[Emitted]) -> None:
        now = time.perf_counter()
        for emitted in tokens:
            if emitted.request in self._last:
                before = self._last[emitted.request]
                if before is not None:
                    self.seen.append(now - before)
                self._last[emitted.request] = now


def pace(pair: Pair, sizes: Sizes) -> Section:
    """Gaps of running requests while prompts arrive one after another, against those without."""
    idle: dict[str, list[float]] = {}
    waited: dict[str, list[float]] = {}

    def measure(side: Side, number: int) -> float:
        side.clear()
        rows = [pair.prompt(f"runs {number}/{row}", 48) for row in range(sizes.pace_rows)]
        running = fill(side, rows, sizes.answer)
        idle.setdefault(side.name, []).append(_idle_p99_s(side, running, sizes.idle_steps))
        gaps, first_s = Gaps(running), []
        for index, length in enumerate(sizes.pace_prompts):
            first_s.append(_first_among(side, gaps, pair.prompt(f"comes {number}/{index}", length)))
        waited.setdefault(side.name, []).append(quantile(first_s, 0.5))
        side.clear()
        return quantile(gaps.seen, 0.99)

    ours, peer = pair.interleaved(measure)
    mine, theirs = pair.ours.name, pair.peer.name
    prompts = f"{len(sizes.pace_prompts)} prompts of {max(sizes.pace_prompts)}"
    gap = f"gap p99 of {sizes.pace_rows} rows during {prompts}"
    return Section(
        title="Pace of running requests while prompts prefill",
        columns=("measured", "against"),
        cases=[
            Case(
                name=f"{mine}: {gap}, against idle",
                measured=ours,
                base=idle[mine],
                show=milliseconds,
                goal=PACE,
            ),
            Case(name=f"{theirs}: the same", measured=peer, base=idle[theirs], show=milliseconds),
            Case(
                name=f"TTFT of the prompts, {mine} against {theirs}",
                measured=waited[mine],
                base=waited[theirs],
                show=milliseconds,
            ),
        ],
    )


def _idle_p99_s(side: Side, running: Sequence[int], steps: int) -> float:
    gaps = Gaps(running)
    for _ in range(steps):
        gaps.add(side.step())
    return quantile(gaps.seen, 0.99)


def _first_among(side: Side, gaps: Gaps, prompt: Sequence[int]) -> float:
    """Step until this prompt has its first token; return the seconds, and collect gaps."""
    begun = time.perf_counter()
    request = side.submit(prompt, 2)
    for _ in range(PATIENCE_STEPS):
        tokens = side.step()
        gaps.add(tokens)
        if any(emitted.request == request for emitted in tokens):
            return time.perf_counter() - begun
    raise RuntimeError(f"{side.name} does not begin request {request}")


def memory(pair: Pair, sizes: Sizes) -> Section:
    """Peak of MLX's allocations beyond the weights, over the peak of the budget's count."""
    ours = pair.ours
    assert isinstance(ours, OurBatch), ours
    peaks: list[float] = []
    counted: list[float] = []
    for number in range(min(pair.rounds, MEMORY_ROUNDS)):
        pair.clear()
        baseline = mx.get_active_memory()
        mx.reset_peak_memory()
        counted.append(_busy(pair, ours, sizes, number))
        ours.settle()
        peaks.append(mx.get_peak_memory() - baseline)
    pair.clear()
    rows, length = sizes.held[-1]
    return Section(
        title="Peak memory beyond weights, against the peak of what the budget counts",
        columns=("MLX peak", "accounted"),
        cases=[
            Case(
                name=f"{rows} rows of {length}, {sizes.churn_requests} others join and leave",
                measured=peaks,
                base=counted,
                show=mebibytes,
                goal=ACCOUNTED,
            )
        ],
    )


def _busy(pair: Pair, ours: OurBatch, sizes: Sizes, number: int) -> float:
    """Prefill long rows and run short requests beside them; return the most bytes counted."""
    rows, length = sizes.held[-1]
    for row in range(rows):
        ours.submit(pair.prompt(f"memory {number}/{row}", length), sizes.answer)
    waiting = churn_requests(pair, sizes, number)
    open_requests: set[int] = set()
    most = ours.worker.accounted_nbytes
    for _ in range(PATIENCE_STEPS):
        while waiting and len(open_requests) < sizes.churn_rows:
            open_requests.add(ours.submit(*waiting.pop()))
        for emitted in ours.step():
            if emitted.ended:
                open_requests.discard(emitted.request)
        most = max(most, ours.worker.accounted_nbytes)
        if not waiting and not open_requests:
            return float(most)
    raise RuntimeError(f"{ours.name} does not end requests {sorted(open_requests)}")
