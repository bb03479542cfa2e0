"""The choices of one request: submitted together, run together, cancelled together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from mlx_dp.orchestrator.api import (
    RETRY_BUSY_S,
    Ended,
    Generation,
    Granted,
    NewTokens,
    OverloadedError,
    RefusedError,
    ResponseStream,
    Service,
    Started,
)
from mlx_dp.orchestrator.formats.common.api_format import ChoiceEnd, Usage
from mlx_dp.orchestrator.formats.common.errors import ApiError, from_overloaded, from_refused
from mlx_dp.orchestrator.formats.common.generation_request import FieldNames
from mlx_dp.orchestrator.http.stream.queue_pace import QueuePace, queue_load
from mlx_dp.orchestrator.http.stream.yield_budget import (
    TOKEN_UNITS,
    YieldBudget,
    piece_slices,
    piece_units,
    token_slices,
    token_units,
)
from mlx_dp.orchestrator.text.choice_text import ChoiceText, Piece
from mlx_dp.proto.messages.events import FinishReason


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to generate, and the text of its tokens."""

    generation: Generation
    text: ChoiceText


class Sink(Protocol):
    """Receives the choices. Each ends with exactly one ``close``, or all with an error."""

    async def granted(self) -> None: ...

    async def piece(self, index: int, piece: Piece) -> None: ...

    async def close(self, index: int, piece: Piece, end: ChoiceEnd) -> None: ...


class ChoiceStreams:
    """Runs the choices of one request, in order of prompts, ``per_prompt`` choices for each.

    ``names`` are the client's names of fields that the service may refuse. ``pace`` estimates when
    to retry if the queue is full. After ``submit``, the caller must call ``cancel`` in every case;
    ``cancel`` has no effect on finished choices.
    """

    def __init__(
        self,
        service: Service,
        choices: Sequence[Choice],
        budget: YieldBudget,
        *,
        per_prompt: int,
        names: FieldNames,
        pace: QueuePace,
    ) -> None:
        self._service = service
        self._pace = pace
        self._budget = budget
        self._names = names
        self._choices = tuple(choices)
        self._firsts = range(0, len(choices), per_prompt)
        self._streams: list[ResponseStream] = []
        self._grants: list[Granted | None] = [None] * len(choices)
        self._cached = [0] * len(choices)

    def submit(self) -> None:
        """Queue the choices. After an ApiError some may be queued, so the caller must cancel."""
        try:
            for choice in self._choices:
                self._streams.append(self._service.submit(choice.generation))
        except OverloadedError as error:
            if error.status == 429:
                busy_s = self._pace.retry_after_s(queue_load(self._service.state(), preparing=0))
                error.retry_after_s = max(error.retry_after_s, busy_s)
            raise from_overloaded(error) from error
        except RefusedError as error:
            raise from_refused(error, self._names) from error

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def rank_headers(self) -> list[tuple[bytes, bytes]]:
        """Return headers with the owners known so far, and the reasons for their choice."""
        grants = [grant for grant in self._grants if grant is not None]
        if not grants:
            return []
        owners = ",".join(dict.fromkeys(str(grant.dp_rank) for grant in grants))
        reasons = ",".join(dict.fromkeys(grant.reason for grant in grants))
        return [(b"x-dp-rank", owners.encode()), (b"x-routing-reason", reasons.encode())]

    @property
    def all_granted(self) -> bool:
        """Whether every choice has been granted to an owner."""
        return all(grant is not None for grant in self._grants)

    def completion_tokens(self, index: int) -> int:
        """Return the number of tokens of one choice so far."""
        return self._choices[index].text.completion_tokens

    def usage(self) -> Usage:
        prompts = [len(self._choices[first].generation.prompt_ids) for first in self._firsts]
        return Usage(
            prompt_tokens=sum(prompts),
            completion_tokens=sum(choice.text.completion_tokens for choice in self._choices),
            cached_tokens=sum(self._cached[first] for first in self._firsts),
        )

    async def run(self, sink: Sink) -> None:
        """Feed the sink until every choice is closed. Raises ApiError when one fails."""
        if len(self._choices) == 1:
            await self._run_choice(0, sink)
            return
        tasks = [
            asyncio.ensure_future(self._run_choice(index, sink))
            for index in range(len(self._choices))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_choice(self, index: int, sink: Sink) -> None:
        rest, reason = await self._follow(index, sink)
        *pieces, last = piece_slices(rest)
        await self._write(index, pieces, sink)
        await self._budget.spend(piece_units(last))
        end = ChoiceEnd(reason=reason, num_tokens=self.completion_tokens(index))
        await sink.close(index, last, end)

    async def _write(self, index: int, pieces: Sequence[Piece], sink: Sink) -> None:
        for piece in pieces:
            await self._budget.spend(piece_units(piece))
            await sink.piece(index, piece)

    async def _follow(self, index: int, sink: Sink) -> tuple[Piece, FinishReason]:
        """Write all pieces but the last. Return the last one, and the reason for the end."""
        choice, stream = self._choices[index], self._streams[index]
        async for event in stream:
            match event:
                case NewTokens():
                    for tokens in token_slices(event):
                        # Nearly all events are one token without log-probabilities, whose work
                        # is too small to count.
                        units = token_units(tokens)
                        if units > TOKEN_UNITS:
                            await self._budget.spend(units)
                        piece = choice.text.push(tokens)
                        if choice.text.stopped:
                            stream.complete()
                            return piece, FinishReason.STOP
                        if piece_units(piece) > units:
                            await self._write(index, piece_slices(piece), sink)
                        elif piece:
                            await sink.piece(index, piece)
                case Granted():
                    self._grants[index] = event
                    await sink.granted()
                case Started(cached_tokens=cached):
                    self._cached[index] = cached
                case Ended():
                    return choice.text.finish(), _finish_reason(event, choice.text)
                case _:
                    assert_never(event)
        raise AssertionError(f"response stream {stream.request_id} has no end")


def _finish_reason(ended: Ended, text: ChoiceText) -> FinishReason:
    """Return STOP or LENGTH. Raises ApiError for any other end."""
    match ended.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return FinishReason.STOP if text.stopped else ended.reason
        case FinishReason.ABORT:
            message = ended.message or "the request was aborted by the server"
            error = ApiError(503, message, code=ended.code or "aborted")
        case FinishReason.ERROR:
            message = ended.message or "the request failed"
            error = ApiError(ended.status, message, code=ended.code or "generation_failed")
        case _:
            assert_never(ended.reason)
    if error.status in (429, 503):
        error.headers["retry-after"] = str(RETRY_BUSY_S)
    raise error
