"""The routes that generate text: from a body to choices that run, in any API format."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response

from mlx_dp.orchestrator.formats.common.api_format import ApiRequest, Endpoint, ResponseContext
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.http.body.body_reader import read_json_body
from mlx_dp.orchestrator.http.connection.while_connected import while_connected
from mlx_dp.orchestrator.http.preparation.choices import choices
from mlx_dp.orchestrator.http.preparation.prechecks import (
    RANK_HEADER,
    refuse_model,
    refuse_overload,
    refuse_unready_rank,
    requested_rank,
    vocab_size,
)
from mlx_dp.orchestrator.http.preparation.prompt import prompt_ids
from mlx_dp.orchestrator.http.preparation.prompt_views import prompt_views
from mlx_dp.orchestrator.http.preparation.sampling import (
    check_grammar,
    check_token_ids,
    refuse_impossible_lengths,
    refuse_many_logprobs,
)
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.orchestrator.http.stream.choice_streams import ChoiceStreams
from mlx_dp.orchestrator.http.stream.streamed_response import StreamedResponse
from mlx_dp.orchestrator.http.stream.whole_response import WholeResponse


class GenerationRoute:
    """Serves one endpoint: checks a request from the cheapest refusal to the most expensive one,
    then runs its choices.
    """

    def __init__(self, context: AppContext, endpoint: Endpoint[Any]) -> None:
        self._context = context
        self._endpoint = endpoint

    async def respond(self, request: Request) -> Response:
        async with self._body(request) as body:
            return await while_connected(request.receive, self._response(request, body))

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body, and count the request as preparing while the context is open.

        Raises ApiError when the memory limit or the queue has no room for it.
        """
        context = self._context
        options = context.options
        with context.body_memory.reserve() as reserve:
            # Counted only when it is complete: slow bodies must not block complete requests.
            body = await read_json_body(
                request,
                reserve,
                max_nbytes=options.max_body_nbytes,
                timeout_s=options.body_timeout_s,
            )
            context.preparing += 1
            try:
                # In the same turn of the loop as the count, or requests that arrive together
                # would refuse each other while the queue has room for some.
                self._refuse_overload()
                yield body
            finally:
                context.preparing -= 1

    async def _response(self, request: Request, body: bytes) -> Response:
        context = self._context
        fields = await context.body_parser.parse(self._endpoint.body, body)
        accepted: ApiRequest = self._endpoint.accept(fields)
        asked = accepted.generation
        rank = self._precheck(request, asked)
        limits = context.service.limits()
        refuse_many_logprobs(asked, limits)
        await check_grammar(asked, context.text.facts, context.grammars, context.grammar_limit)
        prompts = await self._prompts(asked)
        views = await prompt_views(asked, prompts, context.text, limits, context.yield_budget)
        streams = self._streams(asked, prompts, rank=rank, label=request.state.request_id)
        response = ResponseContext(
            model=context.model,
            generation=asked,
            prompts=views,
            token_bytes=context.text.token_bytes,
        )
        if not asked.stream:
            return WholeResponse(streams, accepted.whole_writer(response))
        keep_alive_s = context.options.keep_alive_s
        return StreamedResponse(
            streams, accepted.stream_writer(response), keep_alive_s=keep_alive_s
        )

    def _precheck(self, request: Request, asked: GenerationRequest) -> int | None:
        """Check everything that costs nothing, and return the rank that the client asks for."""
        context = self._context
        refuse_model(asked.model, context.options)
        refuse_impossible_lengths(asked)
        state = context.service.state()
        rank = requested_rank(request.headers.getlist(RANK_HEADER), asked.ranks, len(state.owners))
        refuse_unready_rank(state, rank)
        self._refuse_overload(asked.choices_per_prompt, param=asked.names.num_choices)
        if asked.num_choices > asked.choices_per_prompt:
            self._refuse_overload(asked.num_choices, param=asked.names.prompt)
        limit = self._vocab_size()
        check_token_ids("logit_bias", (token for token, _ in asked.sampling.logit_bias), limit)
        check_token_ids("stop_token_ids", asked.stop_token_ids, limit)
        return rank

    def _refuse_overload(self, choices: int = 1, *, param: str = "n") -> None:
        # Other requests: this one counts as preparing, too.
        preparing = self._context.preparing - 1
        state = self._context.service.state()
        pace = self._context.queue_pace
        if not preparing and not state.num_open_requests:
            pace.note_idle()
        refuse_overload(
            state,
            preparing=preparing,
            retry_after_s=pace.retry_after_s,
            choices=choices,
            param=param,
        )

    async def _prompts(self, asked: GenerationRequest) -> Sequence[tuple[int, ...]]:
        """Render and tokenize the prompts. Raises ApiError."""
        context = self._context
        limits = context.service.limits()
        limit = self._vocab_size()
        param = asked.names.prompt
        found: list[tuple[int, ...]] = []
        for prompt in asked.prompts:
            ids = await prompt_ids(context.text, prompt, limits, param=param)
            check_token_ids(param, ids, limit)
            found.append(ids)
            # There may be many: let running answers have the event loop in between.
            await asyncio.sleep(0)
        return found

    def _streams(
        self,
        asked: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        *,
        rank: int | None,
        label: str,
    ) -> ChoiceStreams:
        context = self._context
        limits = context.service.limits()
        return ChoiceStreams(
            context.service,
            list(choices(asked, prompts, context.text, limits, rank=rank, label=label)),
            context.yield_budget,
            per_prompt=asked.choices_per_prompt,
            names=asked.names,
            pace=context.queue_pace,
        )

    def _vocab_size(self) -> int:
        return vocab_size(self._context.service.state(), self._context.text.facts.vocab_size)
