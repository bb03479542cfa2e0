"""The contract between HTTP and an API format.

HTTP owns connections, bodies, keys, limits, submission, and when something is written. A format
owns what a body may hold, and the bytes of responses and errors. It never sees a socket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from pydantic import BaseModel

from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.text.choice_text import Piece
from mlx_dp.proto.messages.events import FinishReason

Body = TypeVar("Body", bound=BaseModel)
"""A route's model class for request bodies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request: all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """The parts of one prompt that a response may show."""

    num_tokens: int
    encoded_ids: bytes | None = None
    """The token ids as a JSON array, if the request ``shows_token_ids``."""
    text: str | None = None
    """The text, if the request ``shows_prompt``."""


class EncodedIds:
    """Token ids as items of a JSON array, which takes a fifth of a list's memory."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, ids: Sequence[int]) -> None:
        """Append further ids."""
        if not ids:
            return
        if self._items:
            self._items += b","
        self._items += msgspec.json.encode(ids)[1:-1]

    @property
    def array(self) -> bytes:
        return b"[" + self._items + b"]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """The request, prompts and model of a response, as its writer needs them."""

    model: str
    generation: GenerationRequest
    prompts: Sequence[PromptView]
    token_bytes: Callable[[int], bytes]

    @property
    def num_choices(self) -> int:
        return self.generation.num_choices

    def prompt_view(self, index: int) -> PromptView:
        """Return the prompt that a choice answers."""
        return self.prompts[index // self.generation.choices_per_prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """How a choice ended: STOP or LENGTH, since any other end fails the whole response."""

    reason: FinishReason
    num_tokens: int


class StreamWriter(Protocol):
    """Writes one response as server-sent events. Each method returns whole events, or b""."""

    def start(self) -> bytes:
        """Return what precedes everything else, as soon as the stream begins."""

    def opening(self, index: int) -> bytes:
        """Return what precedes the first piece of a choice."""

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        """Return the event of a piece. ``num_tokens``: tokens of its choice so far."""

    def closing(self, index: int, end: ChoiceEnd) -> bytes:
        """Return what follows the last piece of a choice."""

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a response that succeeded."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a response that failed after its start."""

    def keep_alive(self) -> bytes:
        """Return what fills a silence."""


class WholeWriter(Protocol):
    """Collects one response, and writes it as one body."""

    def piece(self, index: int, piece: Piece) -> None: ...

    def closing(self, index: int, end: ChoiceEnd) -> None: ...

    def body(self, usage: Usage) -> Iterator[bytes | bytearray]:
        """Yield the body in parts, once every choice is closed."""


class ApiRequest(Protocol):
    """A body that passed all checks of its format."""

    @property
    def generation(self) -> GenerationRequest: ...

    def stream_writer(self, context: ResponseContext) -> StreamWriter: ...

    def whole_writer(self, context: ResponseContext) -> WholeWriter: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[Body]):
    """A POST route that generates text."""

    path: str
    name: str
    """The operation's name in the OpenAPI document."""
    description: str
    body: type[Body]
    """Checks each field by itself. Importable by name: a child process parses large bodies."""
    accept: Callable[[Body], ApiRequest]
    """Checks the body as a whole. Raises ApiError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """An error as its format writes it."""

    status: int
    body: bytes


class ApiFormat(Protocol):
    """One API: its routes, its key's header, and the shape of its errors."""

    @property
    def endpoints(self) -> Sequence[Endpoint[Any]]: ...

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the key that a client gave, or None."""

    def unauthorized(self) -> ApiError:
        """Return the error for a missing or wrong key, which names the header to send."""

    def error_response(self, error: ApiError) -> ErrorResponse: ...
