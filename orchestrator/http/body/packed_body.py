"""A large request body made small: its token ids packed, the rest as checked JSON.

Parsing JSON of a million numbers takes a tenth of a second and more, and holds the interpreter's
lock, so that no thread helps. So this module also runs as a child process, which parses the body;
reading its result takes a few milliseconds.
"""

import importlib
import json
import signal
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from pydantic import BaseModel, ValidationError

from mlx_dp.orchestrator.formats.common.api_format import Body
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.generation_request import Prompt
from mlx_dp.orchestrator.formats.common.validation import from_validation

MAX_OTHER_VALUES: Final = 2**17
"""Values beside the token ids. The longest chat that is allowed has half as many."""
CHILD_LIMIT_S: Final = 20


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """An ``ApiError``, from the child process."""

    status: int
    message: str
    param: str | None
    code: str | None

    @classmethod
    def from_error(cls, error: ApiError) -> "Refusal":
        return cls(status=error.status, message=str(error), param=error.param, code=error.code)

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code)


class PackedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One prompt: its ids, or its text if they are None."""

    text: str
    ids: bytes | None


class PackedBody(msgspec.Struct, frozen=True, tag=True):
    """``prompts`` is None when nothing was taken out of ``rest``."""

    rest: bytes
    prompts: list[PackedPrompt] | None


def pack(kind: type[BaseModel], body: bytes) -> PackedBody | Refusal:
    """Check a body in full, and pack it.

    A model class whose prompts may be token ids names their field, an array, in ``packed_member``.
    """
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        return Refusal.from_error(from_validation(error))
    members = json.loads(body)
    prompts = None
    name = _packed_member(kind)
    if name is not None:
        prompts = [_packed(prompt) for prompt in getattr(fields, name)]
        members[name] = [""]
    num_values = _num_values(members)
    if num_values > MAX_OTHER_VALUES:
        message = f"the body has {num_values} values beside token ids, {MAX_OTHER_VALUES} at most"
        return Refusal.from_error(ApiError(400, message))
    return PackedBody(rest=json.dumps(members, ensure_ascii=False).encode(), prompts=prompts)


def unpack(kind: type[Body], packed: PackedBody) -> Body:
    """Return the fields of the body that was packed."""
    fields = kind.model_validate_json(packed.rest)
    name = _packed_member(kind)
    if name is not None and packed.prompts is not None:
        setattr(fields, name, tuple(map(_unpacked, packed.prompts)))
    return fields


def _packed_member(kind: type[BaseModel]) -> str | None:
    name: str | None = getattr(kind, "packed_member", None)
    return name


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
    """Count values without recursion, since a body may be nested deeply."""
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


def class_path(kind: type[BaseModel]) -> str:
    """Return the argument of ``main`` that names a model class: ``module:name``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def main() -> None:
    """Pack one body from stdin to stdout. The argument is the body's model class."""
    # The default action ends the process even inside the parser.
    signal.alarm(CHILD_LIMIT_S)
    [path] = sys.argv[1:]
    module, _, name = path.partition(":")
    kind: type[BaseModel] = getattr(importlib.import_module(module), name)
    packed = pack(kind, sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.msgpack.encode(packed))


if __name__ == "__main__":
    main()
