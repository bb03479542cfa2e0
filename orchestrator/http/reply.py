"""The two kinds of reply to a request for text. Both end when their client leaves."""

import logging

from fastapi import Response
from starlette.types import Receive, Scope, Send

from mlx_dp.orchestrator.http.body import ClientGoneError
from mlx_dp.orchestrator.http.connection import while_connected
from mlx_dp.orchestrator.http.errors import internal_error
from mlx_dp.orchestrator.http.exchange import Exchange
from mlx_dp.orchestrator.http.sinks import CollectSink, StreamSink, rank_headers
from mlx_dp.orchestrator.http.sse import EventStream
from mlx_dp.orchestrator.http.whole_body import WholeBody
from mlx_dp.orchestrator.openai.answer_format import DONE, AnswerFormat
from mlx_dp.orchestrator.openai.errors import ApiError

logger = logging.getLogger(__name__)


class WholeReply(Response):
    """Answers when all choices are complete, or with one error for all of them."""

    def __init__(self, exchange: Exchange, answers: AnswerFormat, num_choices: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._format = answers
        self._num_choices = num_choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._exchange.submit()
            body = await while_connected(receive, self._run())
        finally:
            self._exchange.cancel()
        await body.send(send, rank_headers(self._exchange))

    async def _run(self) -> WholeBody:
        sink = CollectSink(self._num_choices, self._format)
        await self._exchange.run(sink)
        return await WholeBody.collect(self._format.whole(sink.choices(), self._exchange.usage()))


class StreamReply(Response):
    """Answers with events as they come. What fails after the start is an event too."""

    def __init__(
        self,
        exchange: Exchange,
        answers: AnswerFormat,
        *,
        include_usage: bool,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._format = answers
        self._include_usage = include_usage
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._keep_alive_s)
        try:
            self._exchange.submit()
            await while_connected(receive, self._run(stream), tick=stream.tick)
        except ClientGoneError:
            if not stream.started:
                raise
        except ApiError as error:
            if not stream.started:
                raise
            await stream.close(_last_event(error))
        except Exception:
            if not stream.started:
                raise
            # A stream that is merely cut looks like a network failure to the client.
            logger.exception("a stream broke")
            await stream.close(_last_event(internal_error()))
        finally:
            self._exchange.cancel()

    async def _run(self, stream: EventStream) -> None:
        await self._exchange.run(StreamSink(stream, self._format, self._exchange))
        usage = self._format.usage(self._exchange.usage()) if self._include_usage else b""
        await stream.close(usage + DONE)


def _last_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n" + DONE
