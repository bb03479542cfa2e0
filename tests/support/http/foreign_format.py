"""A tiny API that shares nothing with OpenAI's, to test HTTP's assumptions about formats."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from mlx_dp.orchestrator.formats.common.api_format import (
    ChoiceEnd,
    Endpoint,
    ErrorResponse,
    ResponseContext,
    Usage,
)
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.generation_request import (
    FieldNames,
    GenerationRequest,
    Prompt,
)
from mlx_dp.orchestrator.formats.common.validation import STRICT
from mlx_dp.orchestrator.text.choice_text import Piece

PATH = "/v1/telegrams"
KEY_HEADER = "x-telegraph-key"


class Telegram(BaseModel):
    model_config = STRICT
    packed_member: ClassVar[str] = "words"

    words: tuple[Prompt, ...]
    length: int | None = None
    live: bool = False


class TelegramStream:
    def __init__(self, context: ResponseContext) -> None:
        self._model = context.model

    def start(self) -> bytes:
        return event("connect", model=self._model)

    def opening(self, index: int) -> bytes:
        return event("open", line=index)

    def piece(self, index: int, piece: Piece, num_tokens: int) -> bytes:
        return event("word", line=index, text=piece.text, count=num_tokens)

    def closing(self, index: int, end: ChoiceEnd) -> bytes:
        return event("stop", line=index, why=end.reason.name, count=end.num_tokens)

    def end(self, usage: Usage) -> bytes:
        return event("hangup", sent=usage.prompt_tokens, received=usage.completion_tokens)

    def failure(self, error: ApiError) -> bytes:
        return event("cut", problem=str(error))

    def keep_alive(self) -> bytes:
        return event("tick")


class TelegramSheet:
    def __init__(self, context: ResponseContext) -> None:
        self._lines = [""] * context.num_choices

    def piece(self, index: int, piece: Piece) -> None:
        self._lines[index] += piece.text

    def closing(self, index: int, end: ChoiceEnd) -> None:
        self._lines[index] += f" {end.reason.name}"

    def body(self, usage: Usage) -> Iterator[bytes | bytearray]:
        yield json.dumps({"lines": self._lines, "received": usage.completion_tokens}).encode()


@dataclass(frozen=True)
class TelegramRequest:
    generation: GenerationRequest

    @classmethod
    def accept(cls, telegram: Telegram) -> "TelegramRequest":
        return cls(
            GenerationRequest(
                prompts=telegram.words,
                max_tokens=telegram.length,
                stream=telegram.live,
                names=FieldNames(prompt="words", max_tokens="length"),
            )
        )

    def stream_writer(self, context: ResponseContext) -> TelegramStream:
        return TelegramStream(context)

    def whole_writer(self, context: ResponseContext) -> TelegramSheet:
        return TelegramSheet(context)


class TelegramFormat:
    @property
    def endpoints(self) -> Sequence[Endpoint[Any]]:
        return (
            Endpoint(
                path=PATH,
                name="telegrams",
                description="Sends a telegram.",
                body=Telegram,
                accept=TelegramRequest.accept,
            ),
        )

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        return headers.get(KEY_HEADER.encode())

    def unauthorized(self) -> ApiError:
        return ApiError(401, f"send {KEY_HEADER}")

    def error_response(self, error: ApiError) -> ErrorResponse:
        status = 529 if error.status == 503 else error.status
        problem = {"problem": str(error), "field": error.param}
        return ErrorResponse(status=status, body=json.dumps(problem).encode())


def event(name: str, **members: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(members)}\n\n".encode()
