"""Parts of all of OpenAI's responses: head, usage, token ids, errors, the end of a stream."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mlx_dp.orchestrator.formats.common.api_format import ResponseContext, Usage
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.openai.fields import StreamOptions

KEEP_ALIVE: Final = b": keep-alive\n\n"
_DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The members that every chunk of a response repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "ResponseHead":
        """Make the head of a new response.

        Its id is always ours: the client's request id serves as a label, never as a key.
        """
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model)

    def event_start(self, kind: str) -> bytes:
        """Return the beginning of an event, up to the value of ``choices``."""
        return b"data: " + self.body_start(kind)

    def body_start(self, kind: str) -> bytes:
        """Return the same for a body that is not streamed."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return _encode(head)[:-1] + b',"choices":'


def running_usage(prompt_tokens: int, completion_tokens: int) -> Mapping[str, object]:
    """Return the counts that are known while an answer runs."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def final_usage(usage: Usage) -> Mapping[str, object]:
    return {
        **running_usage(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChunkMembers:
    """Writes the members, with the comma before them.

    The shapes are vLLM's: the prompt's ids come once, in the first chunk of a choice, and each
    chunk has the ids of its tokens, including tokens without text. With ``continuous_usage_stats``
    each chunk has the counts of its choice so far.
    """

    def __init__(self, context: ResponseContext, options: StreamOptions) -> None:
        self._context = context
        self._shows_ids = context.generation.shows_token_ids
        self._continuous_usage = bool(options.continuous_usage_stats)
        self._plain_end = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"

    @property
    def constant(self) -> bool:
        """Whether all chunks but the last end in the same way."""
        return not self._shows_ids and not self._continuous_usage

    def token_ids(self, ids: Sequence[int] = ()) -> bytes:
        """Return the member of a choice that has its tokens."""
        return b',"token_ids":' + _encode(ids) if self._shows_ids else b""

    def prompt_token_ids(self, index: int) -> bytes:
        """Return the member that has the prompt of a choice."""
        return prompt_token_ids(self._context, index)

    def event_end(self, index: int, num_tokens: int) -> bytes:
        """Return what follows the choices in an event of this choice.

        With include_usage, OpenAI puts a null on every chunk but the last.
        """
        if not self._continuous_usage:
            return self._plain_end
        usage = running_usage(self._context.prompt_view(index).num_tokens, num_tokens)
        return b',"usage":%b}\n\n' % _encode(usage)


def prompt_token_ids(context: ResponseContext, index: int) -> bytes:
    """Return the member with the prompt's ids, or b"" if the client did not ask for ids."""
    ids = context.prompt_view(index).encoded_ids
    return b"" if ids is None else b',"prompt_token_ids":' + ids


def stream_end(event_start: bytes, usage: Usage, *, include_usage: bool) -> bytes:
    """Return the last events of a stream, with a chunk of usage if the client asked for it."""
    if not include_usage:
        return _DONE
    return event_start + b'[],"usage":' + _encode(final_usage(usage)) + b"}\n\n" + _DONE


def stream_failure(error: ApiError) -> bytes:
    """Return the last events of a stream that failed."""
    return b"data: " + _encode(error_body(error)) + b"\n\n" + _DONE


def error_body(error: ApiError) -> Mapping[str, object]:
    return {
        "error": {
            "message": str(error),
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_type(status: int) -> str:
    """Return OpenAI's kind of an error."""
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 429 | 503:
            return "overloaded_error"
        case status if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
