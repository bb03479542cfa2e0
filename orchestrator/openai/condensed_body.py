"""A large request body made small: the token ids of its prompts packed, the rest checked JSON.

JSON of a million numbers takes the parser a tenth of a second and more, and no thread helps: it
holds the interpreter's lock all the while. So a process of its own parses it, and what comes back
takes a few milliseconds to read.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
from pydantic import ValidationError

from mlx_dp.orchestrator.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.openai.completion_request import CompletionRequest, Prompt
from mlx_dp.orchestrator.openai.errors import ApiError, from_validation
from mlx_dp.orchestrator.openai.fields import GenerationFields

Kind = Literal["chat", "completion"]
KINDS: Final[dict[Kind, type[GenerationFields]]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}
MAX_OTHER_VALUES: Final = 2**17
"""Values beside the token ids. The longest chat that is allowed has half as many."""

Fields = TypeVar("Fields", bound=GenerationFields)


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why the body is refused, as an ``ApiError`` has it."""

    status: int
    message: str
    param: str | None
    code: str | None

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code)


class PackedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt: its text, or its ids if they are not None."""

    text: str
    ids: bytes | None


class CondensedBody(msgspec.Struct, frozen=True, tag=True):
    """``prompts`` is None where the body's own are in ``rest``."""

    rest: bytes
    prompts: list[PackedPrompt] | None


def condense(kind: Kind, body: bytes) -> CondensedBody | Refusal:
    """Check a body in full, and pack it."""
    try:
        fields = KINDS[kind].model_validate_json(body)
    except ValidationError as error:
        return _refusal(from_validation(error))
    members = json.loads(body)
    prompts = None
    if isinstance(fields, CompletionRequest):
        prompts = [_packed(prompt) for prompt in fields.prompt]
        members["prompt"] = ""
    num_values = _num_values(members)
    if num_values > MAX_OTHER_VALUES:
        message = f"the body has {num_values} values beside token ids, {MAX_OTHER_VALUES} at most"
        return _refusal(ApiError(400, message))
    return CondensedBody(rest=json.dumps(members, ensure_ascii=False).encode(), prompts=prompts)


def restored(kind: type[Fields], condensed: CondensedBody) -> Fields:
    """Return the fields of the body that was condensed."""
    fields = kind.model_validate_json(condensed.rest)
    if isinstance(fields, CompletionRequest) and condensed.prompts is not None:
        fields.prompt = tuple(map(_unpacked, condensed.prompts))
    return fields


def _refusal(error: ApiError) -> Refusal:
    return Refusal(status=error.status, message=str(error), param=error.param, code=error.code)


def _packed(prompt: Prompt) -> PackedPrompt:
    if isinstance(prompt, str):
        return PackedPrompt(prompt, None)
    return PackedPrompt("", array("i", prompt).tobytes())


def _unpacked(prompt: PackedPrompt) -> Prompt:
    if prompt.ids is None:
        return prompt.text
    ids = array("i")
    ids.frombytes(prompt.ids)
    return tuple(ids)


def _num_values(value: Any) -> int:
    """Count without recursion, which the depth of a body would end."""
    count = 0
    left: list[Sequence[Any]] = [[value]]
    while left:
        values = left.pop()
        count += len(values)
        for each in values:
            if isinstance(each, dict):
                left.append(tuple(each.values()))
            elif isinstance(each, list):
                left.append(each)
    return count
