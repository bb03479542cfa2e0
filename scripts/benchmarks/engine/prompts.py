"""Prompts: the speed of prefill, the second turn of a chat, and the cost of a join."""

import statistics
import time

from scripts.benchmarks.engine.side import Pair, Side, answer, fill, first_token_s, step_until
from scripts.benchmarks.engine.sizes import Sizes
from scripts.benchmarks.results.cases import Case, Goal, Section, fine_milliseconds, tokens_per_s
from scripts.benchmarks.results.report import milliseconds

AS_FAST = Goal(at_least=0.97)
SECOND_TURN = Goal(at_most=0.15)
JOINS = 3
"""Repetitions per round: a join is short, and the steps around it vary."""
FLAT = Goal(at_most=1.5)
"""The goal: with sixteen times the tokens, a join costs at most this much more, for noise."""


def prefill(pair: Pair, sizes: Sizes) -> Section:
    count, length = sizes.short_prompts
    cases = [
        _prefilled(pair, f"one prompt of {sizes.long_prompt}", [sizes.long_prompt]),
        _prefilled(pair, f"{count} prompts of {length} together", [length] * count),
    ]
    return Section(
        title="Prefill, up to the first token of each",
        columns=(pair.ours.name, pair.peer.name),
        cases=cases,
    )


def _prefilled(pair: Pair, name: str, lengths: list[int]) -> Case:
    def measure(side: Side, number: int) -> float:
        side.clear()
        prompts = [
            pair.prompt(f"{name} {number}/{index}", length) for index, length in enumerate(lengths)
        ]
        return sum(lengths) / first_token_s(side, prompts)

    ours, peer = pair.interleaved(measure)
    pair.clear()
    return Case(name=name, measured=ours, base=peer, show=tokens_per_s, goal=AS_FAST)


def second_turn(pair: Pair, sizes: Sizes) -> Section:
    """Ours reuses the first turn. The peer prefills everything, as its server does uncached."""
    asked, answered = sizes.history
    cold: list[float] = []

    def measure(side: Side, number: int) -> float:
        side.clear()
        prompt = pair.prompt(f"first turn {number}", asked)
        turn = pair.prompt(f"second turn {number}", sizes.turn)
        if side is pair.peer:
            history = [*prompt, *pair.prompt(f"answer {number}", answered)]
            return first_token_s(side, [[*history, *turn]])
        history = [*prompt, *answer(side, prompt, answered)]
        side.settle()
        warm_s = first_token_s(side, [[*history, *turn]])
        side.clear()
        cold.append(first_token_s(side, [[*history, *turn]]))
        return warm_s

    ours, peer = pair.interleaved(measure)
    pair.clear()
    name = f"{sizes.turn} new tokens after {asked} and an answer of {answered}"
    return Section(
        title="Time to the first token of a second turn",
        columns=(pair.ours.name, f"{pair.peer.name}, cold"),
        cases=[
            Case(name=name, measured=ours, base=peer, show=milliseconds, goal=SECOND_TURN),
            Case(name="the same, ours cold", measured=cold, base=peer, show=milliseconds),
        ],
    )


def join(pair: Pair, sizes: Sizes) -> Section:
    """The time that a short request adds to the steps in which it joins rows with many tokens."""
    cases: list[Case] = []
    for rows, length in sizes.held:
        pair.clear()
        prompts = [pair.prompt(f"held {rows}/{index}", length) for index in range(rows)]
        for side in (pair.ours, pair.peer):
            fill(side, prompts, sizes.answer)

        def measure(side: Side, number: int, rows: int = rows) -> float:
            joins = [
                _join_s(side, pair.prompt(f"joins {rows}/{number}/{index}", sizes.join_prompt))
                for index in range(JOINS)
            ]
            return statistics.median(joins)

        ours, peer = pair.interleaved(measure)
        name = f"{rows * length} tokens held in {rows} rows"
        cases.append(Case(name=name, measured=ours, base=peer, show=fine_milliseconds))
    pair.clear()
    least, most = cases[0].measured, cases[-1].measured
    cases.append(
        Case(
            name="ours: most / least", measured=most, base=least, show=fine_milliseconds, goal=FLAT
        )
    )
    return Section(
        title=f"Time that the join of a prompt of {sizes.join_prompt} adds to its steps",
        columns=(pair.ours.name, pair.peer.name),
        cases=cases,
    )


def _join_s(side: Side, prompt: list[int]) -> float:
    """Seconds beyond those of as many steps without a join.

    Up to the second token, since the rows may be merged only in the step after the first.
    """
    side.step()
    alone = [_step_s(side) for _ in range(5)]
    begun = time.perf_counter()
    request = side.submit(prompt, 100)
    steps = step_until(side, [request], tokens=2)
    took_s = time.perf_counter() - begun
    side.step()
    side.cancel([request])
    side.step()
    return took_s - steps * statistics.median(alone)


def _step_s(side: Side) -> float:
    begun = time.perf_counter()
    side.step()
    return time.perf_counter() - begun
