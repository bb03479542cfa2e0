"""The answers that are open: who reads them, how they end, and what is counted of them."""

import logging
from collections.abc import Callable
from typing import Final

from mlx_dp.orchestrator.control.answers import RequestAnswer
from mlx_dp.orchestrator.control.counters import RequestObserver, RequestTimings, Tally
from mlx_dp.orchestrator.control.ledger import RequestEntry
from mlx_dp.orchestrator.service import Ended, Granted, Started
from mlx_dp.proto.messages import FinishReason, TokenChunk

_logger = logging.getLogger(__name__)


class AnswerDesk:
    """One answer per request in the ledger. It ends exactly once, and is then forgotten here."""

    def __init__(self, tally: Tally, leave: Callable[[int, FinishReason], None]) -> None:
        self._tally: Final = tally
        self._leave: Final = leave
        self._answers: Final[dict[int, RequestAnswer]] = {}
        self._observers: Final[list[RequestObserver]] = []

    def __len__(self) -> int:
        return len(self._answers)

    def observe(self, observer: RequestObserver) -> None:
        self._observers.append(observer)

    def open(self, entry: RequestEntry) -> RequestAnswer:
        """Open the answer of a new request."""
        answer = RequestAnswer(entry.request_id, self._leave)
        self._answers[entry.request_id] = answer
        self._tally.requests_started += 1
        return answer

    def granted(self, entry: RequestEntry, owner: int, reason: str) -> None:
        """It was sent to an owner; with a replay, not for the first time."""
        self._tally.grants[reason] += 1
        self._answers[entry.request_id].push(Granted(owner=owner, reason=reason))

    def started(self, entry: RequestEntry, owner: int) -> None:
        """An owner has its prompt, for the first time: replays are no news to the client."""
        assert entry.granted_at is not None, f"request {entry.request_id} has no grant"
        assert entry.cached_tokens is not None, f"request {entry.request_id} is not prefilled"
        for observer in self._observers:
            observer.started(entry.granted_at - entry.queued_at)
        self._tally.prompt_by_owner[owner] += len(entry.generation.prompt_ids)
        self._tally.cached_by_owner[owner] += entry.cached_tokens
        self._answers[entry.request_id].push(Started(cached_tokens=entry.cached_tokens))

    def tokens(self, entry: RequestEntry, chunk: TokenChunk, *, before: float | None) -> None:
        """Tokens have come. ``before``: when the last ones came, None for the first."""
        assert entry.last_token_at is not None, f"request {entry.request_id} has no tokens"
        for observer in self._observers:
            if before is None:
                observer.first_token(entry.last_token_at - entry.queued_at)
            else:
                observer.next_tokens(entry.last_token_at - before)
        self._answers[entry.request_id].push_tokens(chunk.ids, chunk.logprobs)

    def end(self, entry: RequestEntry, ended: Ended, now: float) -> None:
        """Close the answer, count it and tell the observers."""
        self._answers.pop(entry.request_id).push(ended)
        self._tally.ended(ended.reason, ended.code)
        if ended.reason is FinishReason.ERROR:
            _logger.warning(
                "request %s (%r): %s after %s tokens: %s",
                *(entry.request_id, entry.generation.label[:128], ended.code),
                *(len(entry.emitted), ended.message),
            )
        if self._observers:
            timings = _timings(entry, ended, now)
            for observer in self._observers:
                observer.ended(timings)

    def check(self, entries: set[int]) -> None:
        """Assert that the open answers are those of these requests."""
        assert self._answers.keys() == entries, self._answers.keys() ^ entries


def _timings(entry: RequestEntry, ended: Ended, now: float) -> RequestTimings:
    def since(time: float | None) -> float | None:
        return None if time is None else time - entry.queued_at

    return RequestTimings(
        reason=ended.reason,
        code=ended.code,
        prompt_tokens=len(entry.generation.prompt_ids),
        output_tokens=len(entry.emitted),
        cached_tokens=entry.cached_tokens or 0,
        owner=entry.last_owner,
        granted_s=since(entry.granted_at),
        first_token_s=since(entry.first_token_at),
        last_token_s=since(entry.last_token_at),
        ended_s=now - entry.queued_at,
    )
