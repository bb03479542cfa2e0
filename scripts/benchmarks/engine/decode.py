"""Decoding: a steady batch, rows of very different lengths, and requests that join and leave."""

import random
import time
from collections.abc import Sequence

from scripts.benchmarks.engine.side import PATIENCE_STEPS, Pair, Side, fill
from scripts.benchmarks.engine.sizes import Sizes
from scripts.benchmarks.results.cases import Case, Goal, Section, tokens_per_s

AS_FAST = Goal(at_least=0.97)
FASTER = Goal(at_least=1.15)


def steady(pair: Pair, sizes: Sizes) -> Section:
    cases = [
        Case(
            name=f"{rows} rows",
            **_decoded(pair, sizes, f"steady {rows}", [sizes.row_prompt] * rows),
            show=tokens_per_s,
            goal=AS_FAST,
        )
        for rows in sizes.batches
    ]
    return Section(title="Steady decode", columns=(pair.ours.name, pair.peer.name), cases=cases)


def mixed(pair: Pair, sizes: Sizes) -> Section:
    cases = [
        Case(
            name=f"{len(lengths)} rows of {min(lengths)} to {max(lengths)}, mean "
            f"{sum(lengths) // len(lengths)}",
            **_decoded(pair, sizes, f"mixed {index}", lengths),
            show=tokens_per_s,
            goal=FASTER,
        )
        for index, lengths in enumerate(sizes.mixes)
    ]
    return Section(
        title="Decode of rows of mixed lengths",
        columns=(pair.ours.name, pair.peer.name),
        cases=cases,
    )


def churn(pair: Pair, sizes: Sizes) -> Section:
    """A closed loop: each request that ends is followed by another, until all have run."""

    def measure(side: Side, number: int) -> float:
        side.clear()
        return _churned(pair, side, sizes, number)

    ours, peer = pair.interleaved(measure)
    pair.clear()
    name = f"{sizes.churn_requests} requests, {sizes.churn_rows} at once"
    return Section(
        title="Requests that join and leave (answer tokens, prefill included)",
        columns=(pair.ours.name, pair.peer.name),
        cases=[Case(name=name, measured=ours, base=peer, show=tokens_per_s, goal=FASTER)],
    )


def churn_requests(pair: Pair, sizes: Sizes, number: int) -> list[tuple[list[int], int]]:
    """Prompts and response lengths of one round: all lengths equally often, in random order."""
    chance = random.Random(f"{pair.seed}/churn/{number}")
    count = sizes.churn_requests
    prompts = [sizes.churn_prompts[index % len(sizes.churn_prompts)] for index in range(count)]
    answers = [sizes.churn_answers[index % len(sizes.churn_answers)] for index in range(count)]
    chance.shuffle(prompts)
    chance.shuffle(answers)
    return [
        (pair.prompt(f"churn {number}/{index}", length), tokens)
        for index, (length, tokens) in enumerate(zip(prompts, answers, strict=True))
    ]


def _churned(pair: Pair, side: Side, sizes: Sizes, number: int) -> float:
    waiting = churn_requests(pair, sizes, number)[::-1]
    running = tokens = 0
    begun = time.perf_counter()
    for _ in range(PATIENCE_STEPS):
        while waiting and running < sizes.churn_rows:
            side.submit(*waiting.pop())
            running += 1
        for emitted in side.step():
            tokens += 1
            running -= emitted.ended
        if not running and not waiting:
            return tokens / (time.perf_counter() - begun)
    raise RuntimeError(f"{side.name} does not end {running} requests")


def _decoded(
    pair: Pair, sizes: Sizes, name: str, lengths: Sequence[int]
) -> dict[str, Sequence[float]]:
    """Speeds of both sides with the same rows: only steps alternate."""
    pair.clear()
    prompts = [pair.prompt(f"{name}/{index}", length) for index, length in enumerate(lengths)]
    for side in (pair.ours, pair.peer):
        fill(side, prompts, sizes.answer)

    def measure(side: Side, number: int) -> float:
        # The first step after a pause only launches, and returns what was computed before.
        side.step()
        begun = time.perf_counter()
        tokens = sum(len(side.step()) for _ in range(sizes.steps))
        return tokens / (time.perf_counter() - begun)

    ours, peer = pair.interleaved(measure)
    pair.clear()
    return {"measured": ours, "base": peer}
