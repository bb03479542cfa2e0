"""OpenAI's API: chat and text completions, the format of all routes that belong to no other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import (
    Endpoint,
    ErrorResponse,
    ResponseContext,
    StreamWriter,
    WholeWriter,
)
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.generation_request import (
    FieldNames,
    GenerationRequest,
    Prompt,
    RequestedRank,
    RequestedSampling,
)
from mlx_dp.orchestrator.formats.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.formats.openai.chat_writers import CHAT_BODY, ChatStreamWriter
from mlx_dp.orchestrator.formats.openai.completion_request import CompletionRequest
from mlx_dp.orchestrator.formats.openai.completion_writers import (
    COMPLETION_BODY,
    CompletionStreamWriter,
)
from mlx_dp.orchestrator.formats.openai.fields import CompletionFields, StreamOptions
from mlx_dp.orchestrator.formats.openai.response_parts import error_body
from mlx_dp.orchestrator.formats.openai.structured_output import requested_grammar
from mlx_dp.orchestrator.formats.openai.unsupported import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    refuse_unsupported,
)
from mlx_dp.orchestrator.formats.openai.whole_writer import WholeBodyWriter
from mlx_dp.orchestrator.text.text_model import Chat


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A checked request for /v1/chat/completions."""

    generation: GenerationRequest
    stream_options: StreamOptions

    @classmethod
    def accept(cls, fields: ChatRequest) -> "ChatCompletion":
        """Check the body as a whole. Raises ApiError."""
        refuse_unsupported(fields, CHAT_NEUTRAL)
        num_logprobs = fields.requested_logprobs()
        generation = _generation(fields, [fields.chat()], "messages", num_logprobs)
        return cls(generation, fields.stream_options or StreamOptions())

    def stream_writer(self, context: ResponseContext) -> StreamWriter:
        return ChatStreamWriter(context, self.stream_options)

    def whole_writer(self, context: ResponseContext) -> WholeWriter:
        return WholeBodyWriter(context, CHAT_BODY)


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """A checked request for /v1/completions."""

    generation: GenerationRequest
    stream_options: StreamOptions

    @classmethod
    def accept(cls, fields: CompletionRequest) -> "TextCompletion":
        """Check the body as a whole. Raises ApiError."""
        refuse_unsupported(fields, COMPLETION_NEUTRAL)
        fields.check()
        generation = _generation(
            fields, fields.prompt, "prompt", fields.logprobs, echo=bool(fields.echo)
        )
        return cls(generation, fields.stream_options or StreamOptions())

    def stream_writer(self, context: ResponseContext) -> StreamWriter:
        return CompletionStreamWriter(context, self.stream_options)

    def whole_writer(self, context: ResponseContext) -> WholeWriter:
        return WholeBodyWriter(context, COMPLETION_BODY)


def _generation(
    fields: CompletionFields,
    prompts: Sequence[Prompt | Chat],
    prompt_name: str,
    num_logprobs: int | None,
    *,
    echo: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        prompts=prompts,
        model=fields.model,
        choices_per_prompt=fields.choices,
        stream=bool(fields.stream),
        max_tokens=fields.answer_tokens,
        min_tokens=fields.min_tokens or 0,
        sampling=RequestedSampling.from_body(fields, seed=fields.seed),
        num_logprobs=num_logprobs,
        stop=fields.stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        cache_salt=fields.cache_salt or "",
        grammar=requested_grammar(fields),
        ranks=_ranks(fields),
        shows_token_ids=bool(fields.return_token_ids),
        shows_prompt=echo,
        names=FieldNames(prompt=prompt_name, max_tokens=fields.answer_tokens_name),
    )


def _ranks(fields: CompletionFields) -> tuple[RequestedRank, ...]:
    return tuple(
        RequestedRank(param=param, rank=rank)
        for param, rank in (
            ("routed_dp_rank", fields.routed_dp_rank),
            ("data_parallel_rank", fields.data_parallel_rank),
        )
        if rank is not None
    )


_ENDPOINTS: Final[tuple[Endpoint[Any], ...]] = (
    Endpoint(
        path="/v1/chat/completions",
        name="chat_completions",
        description="Text of messages stays text: only the chat template writes control tokens.",
        body=ChatRequest,
        accept=ChatCompletion.accept,
    ),
    Endpoint(
        path="/v1/completions",
        name="completions",
        description="Special tokens in a prompt's text count as such, as everywhere on this route.",
        body=CompletionRequest,
        accept=TextCompletion.accept,
    ),
)


class OpenAiFormat:
    """The format of OpenAI, and of all routes that belong to no other one."""

    @property
    def endpoints(self) -> Sequence[Endpoint[Any]]:
        return _ENDPOINTS

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the token of ``Authorization: Bearer``."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None

    def unauthorized(self) -> ApiError:
        error = ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer <key>",
            code="invalid_api_key",
        )
        error.headers["www-authenticate"] = "Bearer"
        return error

    def error_response(self, error: ApiError) -> ErrorResponse:
        return ErrorResponse(status=error.status, body=msgspec.json.encode(error_body(error)))
