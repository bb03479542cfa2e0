"""Streaming clients as people use them, httpx and openai, and what each of them saw."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

MODEL = "chaos"
TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One streamed completion. ``exact_usage``: a character of the answer is a token."""

    prompt: str
    prompt_tokens: int = 0
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    rank: int | None = None
    by_openai: bool = False
    exact_usage: bool = False

    def body(self) -> dict[str, Any]:
        fields = {"temperature": self.temperature, "seed": self.seed, "routed_dp_rank": self.rank}
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in fields.items() if value is not None},
        }


@dataclass(slots=True)
class Seen:
    """What one client saw. Times are of this process's monotonic clock."""

    ask: Ask
    sent_s: float = 0.0
    owner: int | None = None
    """The owner that the headers named: the first one of the request."""
    chunks_s: list[float] = field(default_factory=list)
    text: str = ""
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
    def running(self) -> bool:
        return bool(self.chunks_s) and not self.ended_s

    def resumed_s(self, harmed_s: float, lost_s: float) -> float | None:
        """When the next token after a loss came; None when none was to come.

        Tokens of the old owner may still be under way at the loss. So it is the end of the longest
        pause that had begun by then.
        """
        pauses = [
            (after - before, after)
            for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)
            if before <= lost_s + 0.05 and after >= harmed_s
        ]
        return max(pauses)[1] if pauses else None


class ChaosClient:
    """Sends requests to one service, and takes every event down."""

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
        """Run a request to its end. An error is taken down, not raised."""
        seen = Seen(ask) if seen is None else seen
        seen.sent_s = time.monotonic()
        try:
            await (self._by_openai(seen) if ask.by_openai else self._by_httpx(seen))
        except (httpx.HTTPError, openai.OpenAIError, ValueError) as error:
            seen.error = seen.error or f"{type(error).__name__}: {error}"
        seen.ended_s = time.monotonic()
        return seen

    async def _by_httpx(self, seen: Seen) -> None:
        async with self.http.stream("POST", "/v1/completions", json=seen.ask.body()) as answer:
            seen.status = answer.status_code
            seen.retry_after = answer.headers.get("retry-after", "")
            owner = answer.headers.get("x-dp-rank", "")
            seen.owner = int(owner) if owner.isdigit() else None
            if answer.status_code != 200:
                refusal = json.loads(await answer.aread())["error"]
                seen.error, seen.code = str(refusal), str(refusal.get("code"))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    _take(seen, line[6:])
        if not seen.done and not seen.error:
            seen.error = "the stream ended without [DONE]"

    async def _by_openai(self, seen: Seen) -> None:
        body = seen.ask.body()
        extra = {"routed_dp_rank": body.pop("routed_dp_rank", None)}
        try:
            answer = await self._openai.completions.create(**body, extra_body=extra)
            seen.status = 200
            seen.owner = seen.ask.rank
            async for event in answer:
                _event(seen, event.model_dump())
        except openai.APIStatusError as error:
            seen.status, seen.code = error.status_code, str(error.code)
            seen.retry_after = error.response.headers.get("retry-after", "")
            raise
        # The library ends at [DONE] and shows nothing of it.
        seen.done = 1


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
    seen.ids.add(event["id"])
    if usage := event.get("usage"):
        seen.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    for choice in event["choices"]:
        seen.roles += "role" in choice.get("delta", {})
        if choice.get("finish_reason"):
            seen.finish_reasons.append(choice["finish_reason"])
        if text := choice.get("text"):
            seen.text += text
            seen.chunks_s.append(time.monotonic())
