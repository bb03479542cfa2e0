"""The interface of a measured batch engine, and measuring two engines in turn."""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PATIENCE_STEPS = 20_000
"""Steps after which a measurement gives up."""


class Emitted(NamedTuple):
    """One token of one request; ``ended``: its last."""

    request: int
    token: int
    ended: bool


class Side(Protocol):
    """A batch of greedy requests without stop tokens, so that both sides do the same work."""

    @property
    def name(self) -> str: ...

    def submit(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        """Add a request, which the next steps prefill."""

    def cancel(self, requests: Collection[int]) -> None: ...

    def step(self) -> list[Emitted]:
        """Launch one step, and return the tokens of an earlier one."""

    def settle(self) -> None:
        """Wait until the device has finished all launched work."""

    def clear(self) -> None:
        """Cancel all requests, and drop everything that is cached."""


Measure = Callable[[Side, int], float]
"""Measures one side in the round of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Our engine and its peer, with one model."""

    ours: Side
    peer: Side
    vocab_size: int
    rounds: int
    seed: int

    def prompt(self, name: str, num_tokens: int) -> list[int]:
        """A random prompt, without a prefix of another name's prompt, so that no cache helps."""
        chance = random.Random(f"{self.seed}/{name}")
        return [chance.randrange(self.vocab_size) for _ in range(num_tokens)]

    def clear(self) -> None:
        self.ours.clear()
        self.peer.clear()

    def interleaved(self, measure: Measure) -> tuple[list[float], list[float]]:
        """Measure both sides once per round, in alternating order; ours first, then the peer's."""
        found: Mapping[str, list[float]] = {self.ours.name: [], self.peer.name: []}
        for number in range(self.rounds):
            order = (self.ours, self.peer) if number % 2 == 0 else (self.peer, self.ours)
            for side in order:
                found[side.name].append(measure(side, number))
                # Work that one side has launched would slow the other.
                side.settle()
        return found[self.ours.name], found[self.peer.name]


def fill(side: Side, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Submit the prompts, and step until all of them decode."""
    requests = [side.submit(prompt, max_tokens) for prompt in prompts]
    step_until(side, requests, tokens=2)
    side.settle()
    return requests


def step_until(side: Side, requests: Sequence[int], *, tokens: int) -> int:
    """Step until each request has this many more tokens; return the number of steps."""
    missing = dict.fromkeys(requests, tokens)
    for steps in range(1, PATIENCE_STEPS):
        for emitted in side.step():
            if emitted.request in missing:
                missing[emitted.request] -= 1
                if missing[emitted.request] == 0:
                    del missing[emitted.request]
        if not missing:
            return steps
    raise RuntimeError(f"{side.name} gives requests {sorted(missing)} no tokens")


def answer(side: Side, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Run one request to its end."""
    request = side.submit(prompt, max_tokens)
    ids: list[int] = []
    for _ in range(PATIENCE_STEPS):
        for emitted in side.step():
            assert emitted.request == request, emitted
            ids.append(emitted.token)
            if emitted.ended:
                return ids
    raise RuntimeError(f"{side.name} does not end request {request}")


def first_token_s(side: Side, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds until all of these, submitted together, have their first token."""
    begun = time.perf_counter()
    requests = [side.submit(prompt, 2) for prompt in prompts]
    step_until(side, requests, tokens=1)
    return time.perf_counter() - begun
