"""How request fields are read: no value is converted, and refusals show what was got."""

from typing import Final

from pydantic import ConfigDict
from pydantic_core import PydanticCustomError

from mlx_dp.orchestrator.openai.errors import shown

STRICT: Final = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def refuse(message: str, *part: object) -> PydanticCustomError:
    """A validator's error, about a part of its input if one is given."""
    # Literal braces are no place-holders.
    context = {"message": message}
    if part:
        context["got"] = shown(part[0])
    return PydanticCustomError("refused", "{message}", context)
