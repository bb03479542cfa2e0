"""Seeded random requests of every kind that an owner meets."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_dp.proto.messages.sampling_params import SamplingParams

SALTS = ("", "", "", "tenant-a", "tenant-b")
SHARED_PREFIXES = 12
LONGEST_PROMPT = 480
LONGEST_ANSWER = 48
STOP_IDS = 64
HISTORIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """``cancel_after``: loop runs after its grant, None for most."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str
    cancel_after: int | None

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0


class RequestMaker:
    """Draws prompts that are new, share a prefix, repeat one, or continue a chat."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._chance = random.Random(seed)
        self._vocab_size = vocab_size
        self._prefixes = [self._ids(self._chance.randint(20, 250)) for _ in range(SHARED_PREFIXES)]
        self._histories: deque[tuple[tuple[int, ...], str]] = deque(maxlen=HISTORIES)
        self._last: SoakRequest | None = None

    def draw(self) -> SoakRequest:
        chance = self._chance
        if self._last is not None and chance.random() < 0.05:
            return self._last
        prompt, salt = self._prompt()
        sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=chance.randrange(2**31))
        stops = self._ids(STOP_IDS) if chance.random() < 0.3 else ()
        self._last = SoakRequest(
            prompt_ids=prompt[:LONGEST_PROMPT],
            max_tokens=chance.randint(1, LONGEST_ANSWER),
            stop_token_ids=tuple(sorted(set(stops))),
            params=SamplingParams(temperature=0.0) if chance.random() < 0.6 else sampled,
            cache_salt=salt,
            cancel_after=chance.randint(0, 40) if chance.random() < 0.12 else None,
        )
        return self._last

    def ended(self, request: SoakRequest, answer: Sequence[int]) -> None:
        """Record a chat that a later request may continue."""
        self._histories.append(((*request.prompt_ids, *answer), request.cache_salt))

    def _prompt(self) -> tuple[tuple[int, ...], str]:
        chance, kind = self._chance, self._chance.random()
        if kind < 0.35 and self._histories:
            history, salt = chance.choice(self._histories)
            if len(history) < LONGEST_PROMPT:
                return history + self._ids(chance.randint(1, 40)), salt
        if kind < 0.7:
            shared = chance.choice(self._prefixes)
            kept = len(shared) if chance.random() < 0.7 else chance.randint(1, len(shared))
            return shared[:kept] + self._ids(chance.randint(1, 60)), chance.choice(SALTS)
        return self._ids(chance.choice((1, 2, 7, 30, 64, 65, 120, 300))), chance.choice(SALTS)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(self._vocab_size) for _ in range(count))
