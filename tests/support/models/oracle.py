"""mlx-lm's own output for a single request, and how closely ours must follow it.

An output must equal the oracle's token for token. The one exception is a tie: where the two best
logits lie within float error of each other, the sums of a batch may round the other way. Every tie
is recorded with its gap, and the oracle continues after our token, so that the output after a tie
is still compared.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

TIE_GAP = 1e-4
"""The largest gap of two log-probabilities that float32 sums in another order may swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloAnswer:
    """One greedy output. Per position: its token, the second best one, and the gap to it.

    The stop token is part of the output, as its last.
    """

    ids: tuple[int, ...]
    runners_up: tuple[int, ...]
    gaps: tuple[float, ...]
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    position: int
    gap: float
    ours: int
    oracle: int


@dataclass(slots=True)
class Ties:
    """Counts the positions compared and keeps every tie at one of them."""

    compared: int = 0
    found: list[Tie] = field(default_factory=list)

    def report(self) -> str:
        lines = [f"{len(self.found)} ties in {self.compared} positions"]
        lines += [
            f"  position {tie.position}: gap {tie.gap:.2e}, ours {tie.ours}, oracle {tie.oracle}"
            for tie in self.found
        ]
        return "\n".join(lines)


def greedy_alone(
    model: Any,
    prompt_ids: Sequence[int],
    max_tokens: int,
    stop_ids: Collection[int] = (),
    chunk: int = 512,
) -> SoloAnswer:
    """Return the greedy output of mlx-lm's own single-request generation.

    ``chunk`` is its prefill step; it should be the chunk that the engine under test uses.
    """
    ids: list[int] = []
    runners_up: list[int] = []
    gaps: list[float] = []
    steps = generate_step(
        mx.array(list(prompt_ids)), model, max_tokens=max_tokens, prefill_step_size=chunk
    )
    for token, logprobs in steps:
        runner_up, gap = _second_best(np.array(logprobs.astype(mx.float32)), token)
        ids.append(token)
        runners_up.append(runner_up)
        gaps.append(gap)
        if token in stop_ids:
            break
    steps.close()
    return SoloAnswer(
        ids=tuple(ids),
        runners_up=tuple(runners_up),
        gaps=tuple(gaps),
        stopped=bool(ids) and ids[-1] in stop_ids,
    )


def _second_best(logprobs: np.ndarray, best: int) -> tuple[int, float]:
    others = logprobs.copy()
    others[best] = -np.inf
    runner_up = int(np.argmax(others))
    return runner_up, float(logprobs[best] - logprobs[runner_up])


def first_difference(ours: Sequence[int], oracle: SoloAnswer) -> int | None:
    """Return the first position where both differ, or None when they are equal throughout."""
    for position, (mine, theirs) in enumerate(zip(ours, oracle.ids, strict=False)):
        if mine != theirs:
            return position
    if len(ours) != len(oracle.ids):
        return min(len(ours), len(oracle.ids))
    return None


def assert_same(
    ours: Sequence[int],
    oracle: SoloAnswer,
    ties: Ties,
    *,
    offset: int = 0,
    tie_gap: float = TIE_GAP,
) -> int | None:
    """Compare up to the first tie; return its position, or None when all is equal.

    Raises AssertionError at a difference without a tie. ``offset`` only shifts the reported
    position.
    """
    position = first_difference(ours, oracle)
    ties.compared += len(oracle.ids) if position is None else position + 1
    if position is None:
        return None
    if position >= min(len(ours), len(oracle.ids)):
        raise AssertionError(
            f"ours has {offset + len(ours)} tokens, the oracle {offset + len(oracle.ids)} "
            f"(stopped: {oracle.stopped}); equal up to the shorter one's end"
        )
    mine, theirs, gap = ours[position], oracle.ids[position], oracle.gaps[position]
    if gap > tie_gap or mine != oracle.runners_up[position]:
        raise AssertionError(
            f"position {offset + position}: ours {mine}, the oracle {theirs} (second best "
            f"{oracle.runners_up[position]}, gap {gap:.3e}, a tie is at most {tie_gap:.0e})\n"
            f"ours   ...{list(ours[max(0, position - 4) : position + 4])}\n"
            f"oracle ...{list(oracle.ids[max(0, position - 4) : position + 4])}"
        )
    ties.found.append(Tie(position=offset + position, gap=gap, ours=mine, oracle=theirs))
    return position


def assert_greedy(
    model: Any,
    prompt_ids: Sequence[int],
    ours: Sequence[int],
    *,
    max_tokens: int,
    ties: Ties,
    stop_ids: Collection[int] = (),
    chunk: int = 512,
    tie_gap: float = TIE_GAP,
) -> None:
    """Compare a whole output with the oracle's, and continue after every tie."""
    done = 0
    while True:
        oracle = greedy_alone(
            model, [*prompt_ids, *ours[:done]], max_tokens - done, stop_ids, chunk
        )
        tie = assert_same(ours[done:], oracle, ties, offset=done, tie_gap=tie_gap)
        if tie is None:
            return
        done += tie + 1
        if ours[done - 1] in stop_ids or done == max_tokens:
            if len(ours) != done:
                raise AssertionError(f"ours goes on after its end at {done}: {list(ours[done:])}")
            return
