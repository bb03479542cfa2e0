"""What clients ask, what they must get, and the clients that ask without end."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from chaos_client import Ask, ChaosClient, Seen
from chaos_verdict import RowResult

from mlx_dp.proto.sampling_params import SamplingParams
from mlx_dp.worker.fake.tokens import FakeAnswer

FAKE_VOCAB: Final = 512
MOST_PROMPT_TOKENS: Final = 120
OPENAI_SHARE: Final = 0.25
PAUSE_S: Final = 0.05
QUESTIONS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "To bake bread, you first need to",
)
REFUSALS: Final = (429, 503)


class Oracle(Protocol):
    """Draws requests, and knows their answers."""

    def draw(self) -> Ask: ...

    def expected(self, ask: Ask) -> str: ...

    async def prepare(self, client: ChaosClient) -> None:
        """Learn the answers, while nothing is harmed."""


class FakeOracle:
    """The fake engine's answers are a function, so that any request can be asked."""

    def __init__(self, rng: random.Random, lengths: tuple[int, int]) -> None:
        self._rng = rng
        self._lengths = lengths

    def draw(self) -> Ask:
        rng = self._rng
        prompt = (f"chaos {rng.getrandbits(32):08x} " * 8)[: rng.randint(6, MOST_PROMPT_TOKENS)]
        warm = rng.random() < 0.5
        return Ask(
            prompt=prompt,
            prompt_tokens=len(prompt),
            max_tokens=rng.randint(*self._lengths),
            temperature=1.0 if warm else 0.0,
            seed=rng.randrange(2**31) if warm else None,
            by_openai=rng.random() < OPENAI_SHARE,
            exact_usage=True,
        )

    def expected(self, ask: Ask) -> str:
        params = SamplingParams(temperature=ask.temperature, seed=ask.seed or 0)
        answer = FakeAnswer(0, FAKE_VOCAB, ask.prompt.encode(), params)
        return bytes(answer.token(at) for at in range(ask.max_tokens)).decode()

    async def prepare(self, client: ChaosClient) -> None:
        """There is nothing to learn."""


class ModelOracle:
    """Greedy answers of a model, each learnt from a run that nothing disturbed."""

    def __init__(self, rng: random.Random, lengths: tuple[int, int]) -> None:
        self._rng = rng
        self._asks = [Ask(prompt=each, max_tokens=rng.randint(*lengths)) for each in QUESTIONS]
        self._answers: dict[tuple[str, int], str] = {}

    def draw(self) -> Ask:
        ask = self._rng.choice(self._asks)
        return replace(ask, by_openai=self._rng.random() < OPENAI_SHARE)

    def expected(self, ask: Ask) -> str:
        return self._answers[ask.prompt, ask.max_tokens]

    async def prepare(self, client: ChaosClient) -> None:
        for ask in self._asks:
            seen = await client.stream(ask)
            assert not seen.error, seen.error
            self._answers[ask.prompt, ask.max_tokens] = seen.text


class Load:
    """Clients that ask one request after another, each judged when it ends.

    ``refusals_allowed``: overload that says when to come back is no failure for now.
    """

    def __init__(
        self, client: ChaosClient, oracle: Oracle, result: RowResult, *, streams: int
    ) -> None:
        self._client = client
        self._oracle = oracle
        self._result = result
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.seen: dict[int, Seen] = {}
        self.refusals_allowed = False

    def start(self) -> None:
        self._stopping = False
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(self._streams)]

    async def stop(self) -> None:
        """Let each client finish what it has begun."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def abandon(self) -> None:
        """Cut all connections, as the service is gone."""
        for task in self._tasks:
            task.cancel()

    def streaming(self, owners: Sequence[int]) -> list[Seen]:
        """The streams in progress whose first owner is one of these."""
        return [seen for seen in self.seen.values() if seen.running and seen.owner in owners]

    async def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Poll a condition of the clients, which send no event; False when time is up."""
        ends = asyncio.get_running_loop().time() + timeout_s
        while not holds():
            if asyncio.get_running_loop().time() > ends:
                return False
            await asyncio.sleep(0.002)
        return True

    async def _work(self, client: int) -> None:
        while not self._stopping:
            seen = Seen(self._oracle.draw())
            self.seen[client] = seen
            # Whoever asked during a fault may hear of it when that is over.
            allowed = self.refusals_allowed
            await self._client.stream(seen.ask, seen)
            refused = seen.status in REFUSALS and seen.retry_after and not seen.text
            if refused and (allowed or self.refusals_allowed):
                self._result.refused += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self._result.take(seen, self._oracle.expected(seen.ask))
            if seen.error:
                await asyncio.sleep(PAUSE_S)
