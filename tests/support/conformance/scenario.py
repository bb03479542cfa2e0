"""Clients' requests as values: which requests, when, and which of them are aborted."""

import random
from dataclasses import dataclass, replace

from mlx_dp.kvcache.prefix.snapshot_points import SNAPSHOT_INTERVAL
from tests.support.text.tiny_tokenizer import VOCAB_SIZE

SHARED = 130
"""Tokens that the prompts of a conversation share: more than two snapshots apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. It arrives at loop run ``turn``, and not before ``after`` ended.

    With ``continues`` its prompt is that of ``after``, its response, and then ``prompt``. It is
    aborted once it has ``abort_tokens``, or ``abort_turns`` after it was submitted. At least
    ``cached`` of its prompt's tokens must come from the prefix cache.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    turn: int = 0
    after: int | None = None
    continues: bool = False
    abort_tokens: int | None = None
    abort_turns: int | None = None
    salt: str = ""
    cached: int = 0


def crowd(rng: random.Random) -> list[Ask]:
    """Requests of all lengths that come and go, more than there are slots for.

    Around the windows of the tiny models (8) and around snapshots (64 and 128).
    """
    asks = [
        Ask(prompt=_tokens(rng, 140), max_tokens=7),
        Ask(prompt=_tokens(rng, 1), max_tokens=12),
        Ask(prompt=_tokens(rng, 9), max_tokens=4),
        Ask(prompt=_tokens(rng, 65), max_tokens=1),
        Ask(prompt=_tokens(rng, 90), max_tokens=9, abort_turns=2),
        Ask(prompt=_tokens(rng, 23), max_tokens=9, abort_tokens=3),
        Ask(prompt=_tokens(rng, 8), max_tokens=10),
        Ask(prompt=_tokens(rng, 2), max_tokens=2),
        Ask(prompt=_tokens(rng, 33), max_tokens=6),
    ]
    # It needs a wider row than the others, and outgrows the row that it gets.
    long = Ask(prompt=_tokens(rng, 250), max_tokens=12)
    return [replace(ask, turn=2 * i) for i, ask in enumerate([long, *rng.sample(asks, len(asks))])]


def burst(rng: random.Random) -> list[Ask]:
    """Short requests that come at once, so that one step can prefill all of them."""
    return [Ask(prompt=_tokens(rng, length), max_tokens=5) for length in (5, 21, 12, 14)]


def conversation(rng: random.Random) -> list[Ask]:
    """Prompts that share prefixes, and second turns that follow a response."""
    shared = _tokens(rng, SHARED)
    first = shared + _tokens(rng, 9)
    return [
        Ask(prompt=first, max_tokens=6),
        Ask(prompt=first, max_tokens=4),
        Ask(prompt=_tokens(rng, 5), max_tokens=9),
        Ask(prompt=_tokens(rng, 20), max_tokens=5, after=0, continues=True, cached=len(first)),
        Ask(prompt=shared + _tokens(rng, 4), max_tokens=5, after=0, cached=128),
        Ask(prompt=shared[:100] + _tokens(rng, 9), max_tokens=4, after=0),
        Ask(prompt=shared[:100] + _tokens(rng, 6), max_tokens=3, after=5, cached=64),
        Ask(prompt=first, max_tokens=9, after=3, abort_tokens=2, cached=128),
        Ask(prompt=_tokens(rng, 3), max_tokens=5, after=7, continues=True, cached=128),
        Ask(prompt=_tokens(rng, 1), max_tokens=4, after=3, continues=True, cached=len(first) + 20),
        Ask(prompt=first, max_tokens=3, after=0, salt="another tenant"),
        Ask(prompt=_tokens(rng, 2), max_tokens=4, after=2, continues=True, cached=13),
        Ask(prompt=_tokens(rng, 7), max_tokens=6, after=5, continues=True, cached=109),
    ]


def sample(rng: random.Random, *, shared: int = SHARED, longest: int = 252) -> list[Ask]:
    """One request of each sort that a burst, a crowd and a conversation have."""
    first = _tokens(rng, shared + 9)
    boundary = shared - shared % SNAPSHOT_INTERVAL
    return [
        Ask(prompt=first, max_tokens=4),
        Ask(prompt=_tokens(rng, 5), max_tokens=6),
        Ask(prompt=_tokens(rng, 21), max_tokens=3),
        Ask(prompt=_tokens(rng, 12), max_tokens=5, abort_tokens=2),
        # By default it outgrows the row that it gets.
        Ask(prompt=_tokens(rng, longest), max_tokens=8, turn=1),
        Ask(prompt=_tokens(rng, 20), max_tokens=4, after=0, continues=True, cached=len(first)),
        Ask(prompt=first[:shared] + _tokens(rng, 4), max_tokens=3, after=0, cached=boundary),
        Ask(prompt=first[: shared - 30] + _tokens(rng, 6), max_tokens=3, after=0),
        Ask(prompt=first, max_tokens=2, after=0, salt="another tenant"),
        Ask(prompt=_tokens(rng, 2), max_tokens=3, after=1, continues=True, cached=10),
        Ask(prompt=_tokens(rng, 90), max_tokens=9, after=1, abort_turns=2),
    ]


def short(rng: random.Random) -> list[Ask]:
    """Requests one after another, each prompt in one chunk, beside any other work of the step."""
    lengths = (5, 31, 1, 23, 9)
    return [
        Ask(prompt=_tokens(rng, length), max_tokens=10, turn=2 * i)
        for i, length in enumerate(lengths)
    ]


def together(*parts: list[Ask]) -> list[Ask]:
    """All of these at once: an ask keeps its predecessor."""
    asks: list[Ask] = []
    for part in parts:
        base = len(asks)
        for ask in part:
            after = None if ask.after is None else base + ask.after
            asks.append(replace(ask, after=after))
    return asks


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))
