"""The httpx and openai clients that people use, and records of what they received."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import openai

MODEL = "chaos"
TIMEOUT_S = 90.0
OURS: Final = ("routed_dp_rank", "repetition_penalty")
"""Fields of a body that OpenAI's own interface does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``prompt`` is a completion's prompt, or a chat's only message."""

    prompt: str
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    rank: int | None = None
    by_openai: bool = False
    chat: bool = False
    stream: bool = True
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    penalised: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **self._asked(),
        }
        optional = {"seed": self.seed, "routed_dp_rank": self.rank}
        return fields | {name: value for name, value in optional.items() if value is not None}

    def _asked(self) -> dict[str, Any]:
        """The request's fields, without options that keep their defaults."""
        fields: dict[str, Any] = {"prompt": self.prompt}
        if self.chat:
            fields = {"messages": [{"role": "user", "content": self.prompt}]}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.n > 1:
            fields["n"] = self.n
        if self.stop:
            fields["stop"] = list(self.stop)
        if self.penalised:
            fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
            fields["repetition_penalty"] = 1.1
        if self.logprobs is not None and self.chat:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return fields


@dataclass(slots=True)
class Seen:
    """Everything that one client received. Times are of this process's monotonic clock."""

    ask: Ask
    sent_s: float = 0.0
    owner: int | None = None
    """The owner named by the response headers: the request's first owner."""
    chunks_s: list[float] = field(default_factory=list)
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    """The text of each choice."""
    tokens: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    """The same text, rebuilt from the log-probabilities."""
    status: int = 0
    retry_after: str = ""
    error: str = ""
    code: str = ""
    done: int = 0
    after_done: int = 0
    roles: int = 0
    ids: set[str] = field(default_factory=set)
    finish_reasons: list[str] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    ended_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts[choice] for choice in sorted(self.texts))

    @property
    def running(self) -> bool:
        return bool(self.chunks_s) and not self.ended_s

    def resumed_s(self, harmed_s: float, lost_s: float) -> float | None:
        """The time of the first token after a loss; None if all tokens had arrived.

        Tokens of the old owner may still be in flight at the loss. So this is the end of
        the longest pause that had begun by then.
        """
        pauses = [
            (after - before, after)
            for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)
            if before <= lost_s + 0.05 and after >= harmed_s
        ]
        return max(pauses)[1] if pauses else None

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest wait between two tokens that overlaps this span of time."""
        gaps = [
            after - before
            for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)
            if before <= end_s and after >= begin_s
        ]
        return max(gaps, default=0.0)


class ChaosClient:
    """Sends requests to one service, and records every event."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=TIMEOUT_S,
            default_headers={"Connection": "close"},
        )

    async def close(self) -> None:
        await self.http.aclose()
        await self._openai.close()

    async def stream(self, ask: Ask, seen: Seen | None = None) -> Seen:
        """Run a request to its end. An error is recorded, not raised."""
        seen = Seen(ask) if seen is None else seen
        seen.sent_s = time.monotonic()
        try:
            await (self._by_openai(seen) if ask.by_openai else self._by_httpx(seen))
        except (httpx.HTTPError, openai.OpenAIError, ValueError) as error:
            seen.error = seen.error or f"{type(error).__name__}: {error}"
        seen.ended_s = time.monotonic()
        return seen

    async def _by_httpx(self, seen: Seen) -> None:
        ask = seen.ask
        async with self.http.stream("POST", ask.path, json=ask.body()) as answer:
            _head(seen, answer.status_code, answer.headers)
            if answer.status_code != 200:
                refusal = json.loads(await answer.aread())["error"]
                seen.error, seen.code = str(refusal), str(refusal.get("code"))
                return
            if not ask.stream:
                _whole(seen, json.loads(await answer.aread()))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    _take(seen, line[6:])
        if not seen.done and not seen.error:
            seen.error = "the stream ended without [DONE]"

    async def _by_openai(self, seen: Seen) -> None:
        body = seen.ask.body()
        extra = {name: body.pop(name) for name in OURS if name in body}
        # Both have the same methods, with other types.
        completions: Any = self._openai.chat if seen.ask.chat else self._openai
        create = completions.completions.with_raw_response.create
        try:
            raw = await create(**body, extra_body=extra)
            _head(seen, raw.status_code, raw.headers)
            answer = raw.parse()
            if not seen.ask.stream:
                _whole(seen, answer.model_dump())
                return
            async for event in answer:
                _event(seen, event.model_dump())
        except openai.APIStatusError as error:
            _head(seen, error.status_code, error.response.headers)
            seen.code = str(error.code)
            raise
        # The library ends at [DONE] and does not show it.
        seen.done = 1


def _head(seen: Seen, status: int, headers: Mapping[str, str]) -> None:
    seen.status = status
    seen.retry_after = headers.get("retry-after", "")
    owner = headers.get("x-dp-rank", "")
    seen.owner = int(owner) if owner.isdigit() else None


def _take(seen: Seen, data: str) -> None:
    if data == "[DONE]":
        seen.done += 1
        return
    seen.after_done += seen.done
    _event(seen, json.loads(data))


def _event(seen: Seen, event: dict[str, Any]) -> None:
    if refusal := event.get("error"):
        seen.error, seen.code = str(refusal), str(refusal.get("code"))
        return
    before = sum(map(len, seen.texts.values()))
    _answer(seen, event)
    if sum(map(len, seen.texts.values())) > before:
        seen.chunks_s.append(time.monotonic())


def _whole(seen: Seen, answer: dict[str, Any]) -> None:
    """A response that is not streamed. It has no times, and its role is no event."""
    _answer(seen, answer)
    seen.roles, seen.done = 0, 1


def _answer(seen: Seen, answer: dict[str, Any]) -> None:
    seen.ids.add(answer["id"])
    if usage := answer.get("usage"):
        seen.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    for choice in answer["choices"]:
        index = choice["index"]
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        seen.roles += bool(said.get("role"))
        seen.texts[index] += said.get("content") or ""
        if choice.get("finish_reason"):
            seen.finish_reasons.append(choice["finish_reason"])
        if logprobs := choice.get("logprobs"):
            shown = [each["token"] for each in logprobs.get("content") or ()]
            seen.tokens[index] += "".join(shown or logprobs.get("tokens") or ())
