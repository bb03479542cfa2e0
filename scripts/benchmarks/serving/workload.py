"""Seeded requests of chosen lengths, no two alike.

Prompts are random words of one token each, so that a prompt has its intended length on every
server. Each is used once per server and differs from all others from its first words on, so that no
prompt cache influences the measurement. Responses are greedy, so that all servers produce the same
tokens and stop at the same places.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from scripts.benchmarks.serving.client import Request

PROMPT_TOKENS = (12, 24, 48, 96, 160, 320)
ANSWER_TOKENS = (24, 48, 64, 96)
LONG_PROMPT_TOKENS = 1500

WORDS = (
    "the of and to in is was for on with as by at from he it his her their this that not are "
    "have had but one all were when we there been who will more if out so said what up time "
    "about them some could him into then now only its over also after first any new these two "
    "may like other how water light house tree river mountain city road school music book paper "
    "glass stone metal fire wind rain snow summer winter morning evening night day week month "
    "year king queen child mother father friend teacher doctor farmer soldier captain ship train "
    "horse bird fish cat dog lion bear wolf apple bread milk salt sugar gold silver iron copper "
    "red green blue white black small large long short high low old young early late fast slow"
)


class Workload:
    """Draws requests; the same seed gives the same ones, regardless of earlier draws."""

    def __init__(self, model: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._words = [
            word
            for word in WORDS.split()
            if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
        ]
        self._seed = seed

    def mixed(self, name: str, count: int) -> list[Request]:
        """``count`` requests of mixed lengths; another ``name`` gives other prompts."""
        chance = random.Random(f"{self._seed}/{name}")
        prompts = _spread(chance, PROMPT_TOKENS, count)
        answers = _spread(chance, ANSWER_TOKENS, count)
        return [
            self._request(chance, prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def fixed(self, name: str, count: int, prompt_tokens: int, max_tokens: int) -> list[Request]:
        """``count`` requests of one shape."""
        chance = random.Random(f"{self._seed}/{name}")
        return [self._request(chance, prompt_tokens, max_tokens) for _ in range(count)]

    def _request(self, chance: random.Random, prompt_tokens: int, max_tokens: int) -> Request:
        text = "".join(f" {word}" for word in chance.choices(self._words, k=prompt_tokens))
        return Request(prompt=text, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def _spread(chance: random.Random, lengths: Sequence[int], count: int) -> list[int]:
    """All lengths equally often, in random order: runs differ in order but not in work."""
    spread = [lengths[index % len(lengths)] for index in range(count)]
    chance.shuffle(spread)
    return spread
