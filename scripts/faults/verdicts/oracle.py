"""The requests that clients send, and the responses that they must get."""

import random
from dataclasses import replace
from typing import Any, Final, Protocol

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.fake.tokens import FakeAnswer
from scripts.faults.service.client import Ask, ChaosClient
from scripts.faults.verdicts.verdict import Expected

FAKE_VOCAB: Final = 512
MOST_PROMPT_TOKENS: Final = 120
LEAST_PROMPT_TOKENS: Final = 6
OPENAI_SHARE: Final = 0.25
FORM_SHARE: Final = 0.25
"""Shares of chats, of unstreamed responses, of stop strings, and of penalties."""
RARE_SHARE: Final = 0.125
"""Shares of requests for two choices, and for log-probabilities."""
STOP_CHARACTERS: Final = 3
NEVER_SAID: Final = "$$$"
QUESTIONS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "To bake bread, you first need to",
)
FORMS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"chat": True},
    {"penalised": True},
    {"stop": (".", "\n\n")},
    {"logprobs": 2},
    {"n": 2},
)


class Oracle(Protocol):
    """Draws requests, and knows their responses."""

    def draw(self) -> Ask:
        """A streamed completion with one choice."""

    def draw_form(self) -> Ask:
        """A request in any of the forms that clients use."""

    def expected(self, ask: Ask) -> Expected: ...

    async def prepare(self, client: ChaosClient) -> None:
        """Learn the responses, before any fault."""


class FakeOracle:
    """The fake engine's responses are a function, so any request has a known response."""

    def __init__(self, rng: random.Random, lengths: tuple[int, int]) -> None:
        self._rng = rng
        self._lengths = lengths

    def draw(self) -> Ask:
        rng = self._rng
        prompt = f"chaos {rng.getrandbits(32):08x} " * 8
        warm = rng.random() < 0.5
        return Ask(
            prompt=prompt[: rng.randint(LEAST_PROMPT_TOKENS, MOST_PROMPT_TOKENS)],
            max_tokens=rng.randint(*self._lengths),
            temperature=1.0 if warm else 0.0,
            seed=rng.randrange(2**31) if warm else None,
            by_openai=rng.random() < OPENAI_SHARE,
        )

    def draw_form(self) -> Ask:
        rng = self._rng
        ask = replace(
            self.draw(),
            chat=rng.random() < FORM_SHARE,
            stream=rng.random() >= FORM_SHARE,
            penalised=rng.random() < FORM_SHARE,
            n=1 + (rng.random() < RARE_SHARE),
            logprobs=rng.randint(0, 3) if rng.random() < RARE_SHARE else None,
        )
        excess = len(_fake_prompt(ask)) - MOST_PROMPT_TOKENS
        if excess > 0:
            ask = replace(ask, prompt=ask.prompt[:-excess])
        return replace(ask, stop=self._stop(ask)) if rng.random() < FORM_SHARE else ask

    def _stop(self, ask: Ask) -> tuple[str, ...]:
        """Stop strings, one of which occurs in the first choice's text, and one does not."""
        text = _fake_text(ask, 0)
        at = self._rng.randrange(len(text))
        return (NEVER_SAID, text[at : at + self._rng.randint(1, STOP_CHARACTERS)])

    def expected(self, ask: Ask) -> Expected:
        answers = [_until_stop(_fake_text(ask, choice), ask.stop) for choice in range(ask.n)]
        texts = tuple(text for text, _ in answers)
        return Expected(
            texts=texts,
            finish_reasons=tuple(
                "stop" if len(text) < said else "length" for text, said in answers
            ),
            usage=(len(_fake_prompt(ask)), sum(said for _, said in answers)),
            tokens=texts if ask.logprobs is not None else None,
        )

    async def prepare(self, client: ChaosClient) -> None:
        """Nothing needs learning."""


def _fake_prompt(ask: Ask) -> str:
    """The fake tokenizer's tokens of the prompt: one for each byte."""
    return f"user: {ask.prompt}\nassistant: " if ask.chat else ask.prompt


def _fake_text(ask: Ask, choice: int) -> str:
    params = SamplingParams(temperature=ask.temperature, seed=(ask.seed or 0) + choice)
    answer = FakeAnswer(0, FAKE_VOCAB, _fake_prompt(ask).encode(), params)
    return bytes(answer.token(at) for at in range(ask.max_tokens)).decode()


def _until_stop(text: str, stops: tuple[str, ...]) -> tuple[str, int]:
    """The text before the first stop string, and the number of its tokens."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    end, start = min(found, default=(len(text), len(text)))
    return text[:start], end


class ModelOracle:
    """Greedy responses of a model, each learnt from an undisturbed run."""

    def __init__(self, rng: random.Random, lengths: tuple[int, int]) -> None:
        self._rng = rng
        self._asks = [
            replace(Ask(prompt=question, max_tokens=rng.randint(*lengths)), **form)
            for question, form in zip(QUESTIONS, FORMS, strict=True)
        ]
        self._answers: dict[Ask, Expected] = {}

    def draw(self) -> Ask:
        ask = self._rng.choice([ask for ask in self._asks if not ask.chat and ask.n == 1])
        return replace(ask, by_openai=self._rng.random() < OPENAI_SHARE)

    def draw_form(self) -> Ask:
        return replace(
            self._rng.choice(self._asks),
            by_openai=self._rng.random() < OPENAI_SHARE,
            stream=self._rng.random() >= FORM_SHARE,
        )

    def expected(self, ask: Ask) -> Expected:
        return self._answers[replace(ask, by_openai=False, stream=True, rank=None)]

    async def prepare(self, client: ChaosClient) -> None:
        for ask in self._asks:
            seen = await client.stream(ask)
            assert not seen.error, seen.error
            self._answers[ask] = Expected.of(seen)
