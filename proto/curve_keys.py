"""A pair of CURVE keys, in the text form that ZeroMQ has for them."""

from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

KEY_CHARS: Final = 40
"""32 bytes in Z85."""

CurveKey = Annotated[str, Meta(min_length=KEY_CHARS, max_length=KEY_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Both halves of one pair; whoever has them both may speak as its owner."""

    public: CurveKey
    secret: CurveKey = field(repr=False)
