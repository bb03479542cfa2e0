"""POST /v1/chat/completions and /v1/completions: from a body to answers that run."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import Request, Response

from mlx_dp.orchestrator.http.admission import (
    RANK_HEADER,
    refuse_model,
    refuse_overload,
    refuse_unready_rank,
    routed_rank,
    vocab_size,
)
from mlx_dp.orchestrator.http.body import read_json_body
from mlx_dp.orchestrator.http.choices import Work, choices
from mlx_dp.orchestrator.http.chunk_extras import chunk_extras
from mlx_dp.orchestrator.http.connection import while_connected
from mlx_dp.orchestrator.http.echo import echoes
from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.http.exchange import Exchange
from mlx_dp.orchestrator.http.grammar import checked_grammar
from mlx_dp.orchestrator.http.prompt import prompt_ids
from mlx_dp.orchestrator.http.reply import StreamReply, WholeReply
from mlx_dp.orchestrator.openai.answer_format import AnswerFormat, AnswerHead
from mlx_dp.orchestrator.openai.chat_format import ChatFormat
from mlx_dp.orchestrator.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.openai.completion_format import CompletionFormat
from mlx_dp.orchestrator.openai.completion_request import CompletionRequest, Prompt
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.openai.logprob_bound import refuse_many_logprobs
from mlx_dp.orchestrator.openai.sampling import check_token_ids, refuse_impossible_lengths
from mlx_dp.orchestrator.openai.unsupported import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    Neutral,
    refuse_unsupported,
)
from mlx_dp.orchestrator.text.text_model import Chat

Fields = TypeVar("Fields", bound=GenerationFields)


class GenerationRoutes:
    """Checks a request from the cheapest refusal to the dearest, then lets its answers run."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def chat(self, request: Request) -> Response:
        async with self._body(request) as body:
            return await while_connected(request.receive, self._chat(request, body))

    async def completions(self, request: Request) -> Response:
        async with self._body(request) as body:
            return await while_connected(request.receive, self._completions(request, body))

    async def _chat(self, request: Request, body: bytes) -> Response:
        fields, rank = await self._fields(request, body, ChatRequest, CHAT_NEUTRAL)
        logprobs = fields.wanted_logprobs()
        work = await self._work(request, fields, rank, [fields.chat()], logprobs)
        form = ChatFormat(
            self._head("chatcmpl"),
            self._endpoint.text.token_bytes,
            logprobs=logprobs,
            extras=await chunk_extras(work, self._endpoint.share),
        )
        return self._reply(work, form)

    async def _completions(self, request: Request, body: bytes) -> Response:
        fields, rank = await self._fields(request, body, CompletionRequest, COMPLETION_NEUTRAL)
        fields.check()
        self._refuse_overload(len(fields.prompt) * fields.choices, param="prompt")
        work = await self._work(request, fields, rank, fields.prompt, fields.logprobs)
        form = CompletionFormat(
            self._head("cmpl"),
            self._endpoint.text.token_bytes,
            logprobs=fields.logprobs,
            extras=await chunk_extras(work, self._endpoint.share),
            echoes=await self._echoes(fields) if fields.echo else (),
        )
        return self._reply(work, form)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body, and count the request as one that prepares as long as it is needed.

        Raises ApiError when there is no room for it.
        """
        endpoint = self._endpoint
        options = endpoint.options
        with endpoint.room.hold() as take:
            # Before it is counted: bodies that drip in must not shut out requests that are
            # complete.
            body = await read_json_body(
                request,
                take,
                max_nbytes=options.max_body_nbytes,
                timeout_s=options.body_timeout_s,
            )
            endpoint.preparing += 1
            try:
                # In the same turn of the loop, or requests that come together, of which only a
                # part has room, shut out one another.
                self._refuse_overload()
                yield body
            finally:
                endpoint.preparing -= 1

    def _refuse_overload(self, choices: int = 1, *, param: str = "n") -> None:
        # This request is among those that prepare.
        preparing = self._endpoint.preparing - 1
        state = self._endpoint.service.state()
        pace = self._endpoint.pace
        if not preparing and not state.in_hand:
            pace.idle()
        refuse_overload(
            state,
            preparing=preparing,
            retry_after_s=pace.retry_after_s,
            choices=choices,
            param=param,
        )

    async def _fields(
        self, request: Request, body: bytes, kind: type[Fields], neutral: Neutral
    ) -> tuple[Fields, int | None]:
        """Check the body, and the rank that it or the header asks for."""
        fields = await self._endpoint.bodies.fields(kind, body)
        refuse_model(fields.model, self._endpoint.options)
        refuse_unsupported(fields, neutral)
        refuse_impossible_lengths(fields)
        state = self._endpoint.service.state()
        rank = routed_rank(request.headers.getlist(RANK_HEADER), fields, len(state.owners))
        refuse_unready_rank(state, rank)
        self._refuse_overload(fields.choices)
        limit = vocab_size(state, self._endpoint.text.facts.vocab_size)
        check_token_ids("logit_bias", (token for token, _ in fields.logit_bias), limit)
        check_token_ids("stop_token_ids", fields.stop_token_ids or (), limit)
        return fields, rank

    async def _work(
        self,
        request: Request,
        fields: GenerationFields,
        rank: int | None,
        sources: Sequence[Prompt | Chat],
        logprobs: int | None,
    ) -> Work:
        """Do what is dear: the grammar, the template and the tokenizer. Raises ApiError."""
        limits = self._endpoint.service.limits()
        refuse_many_logprobs(fields, len(sources) * fields.choices, logprobs, limits)
        grammar = await checked_grammar(self._endpoint, fields)
        return Work(
            fields=fields,
            prompts=await self._prompts(sources, fields.prompt_name),
            logprobs=logprobs,
            rank=rank,
            grammar=grammar,
            label=request.state.request_id,
        )

    async def _prompts(
        self, prompts: Sequence[Prompt | Chat], param: str
    ) -> Sequence[tuple[int, ...]]:
        endpoint = self._endpoint
        limits = endpoint.service.limits()
        limit = vocab_size(endpoint.service.state(), endpoint.text.facts.vocab_size)
        found: list[tuple[int, ...]] = []
        for prompt in prompts:
            ids = await prompt_ids(endpoint.text, prompt, limits, param=param)
            check_token_ids(param, ids, limit)
            found.append(ids)
            # There may be many: answers that run want the event loop in between.
            await asyncio.sleep(0)
        return found

    async def _echoes(self, fields: CompletionRequest) -> Sequence[str]:
        endpoint = self._endpoint
        return await echoes(fields, endpoint.text, endpoint.service.limits(), endpoint.share)

    def _head(self, prefix: str) -> AnswerHead:
        # Ids of answers are ours: the client's request id labels, and is never a key.
        return AnswerHead(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._endpoint.model,
        )

    def _reply(self, work: Work, form: AnswerFormat) -> Response:
        endpoint = self._endpoint
        exchange = Exchange(
            endpoint.service,
            list(choices(work, endpoint.text, endpoint.service.limits())),
            endpoint.share,
            per_prompt=work.fields.choices,
            names={"prompt": work.fields.prompt_name, "max_tokens": work.fields.answer_tokens_name},
            pace=endpoint.pace,
        )
        if not work.fields.stream:
            return WholeReply(exchange, form, work.num_choices)
        return StreamReply(
            exchange,
            form,
            include_usage=work.fields.include_usage,
            keep_alive_s=endpoint.options.keep_alive_s,
        )
