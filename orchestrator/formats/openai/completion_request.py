"""The body of POST /v1/completions."""

from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import Prompt
from mlx_dp.orchestrator.formats.common.validation import FALSE_IS_UNSET, INTEGRAL, integral, refuse
from mlx_dp.orchestrator.formats.openai.fields import (
    MAX_CHOICES,
    MAX_TOKEN_ID,
    CompletionFields,
)
from mlx_dp.proto.messages.sampling_params import MAX_TOP_LOGPROBS

MAX_PROMPTS: Final = MAX_CHOICES
_SHAPES: Final = "a string, an array of token ids, or an array of either"


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several, each as text or as token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise refuse(f"input should be {_SHAPES}, and not empty")
    if type(value[0]) in (int, float):
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise refuse(f"input should have at most {MAX_PROMPTS} prompts")
    return tuple(prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in value)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refuse(f"input should be {_SHAPES}")
    # type() and not isinstance(): true and false are no token ids.
    if not all(type(token) is int for token in value):
        value = list(map(integral, value))
    if not all(type(token) is int for token in value):
        raise refuse(f"input should be {_SHAPES}")
    for extreme in (min(value), max(value)) if value else ():
        if not 0 <= extreme <= MAX_TOKEN_ID:
            raise refuse(f"token ids should be from 0 to {MAX_TOKEN_ID}", extreme)
    return tuple(value)


_IDS_SCHEMA: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    tuple[Prompt, ...],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                    "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]},
                },
            ]
        }
    ),
]


NumLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL] | None,
    # As in chats, where false means none. 0 asks for the chosen tokens' own.
    FALSE_IS_UNSET,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
                {"enum": [False, None]},
            ]
        }
    ),
]


class CompletionRequest(CompletionFields):
    packed_member: ClassVar[str] = "prompt"

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumLogprobs = None

    def check(self) -> None:
        """Refuse combinations of fields that are valid by themselves. Raises ApiError."""
        if self.echo and self.logprobs is not None:
            raise invalid("echo", "logprobs of the prompt are not supported")
        if len(self.prompt) * self.choices > MAX_CHOICES:
            raise invalid(
                "n",
                f"{len(self.prompt)} prompts with n={self.choices} give "
                f"{len(self.prompt) * self.choices} answers, at most {MAX_CHOICES} are allowed",
            )
