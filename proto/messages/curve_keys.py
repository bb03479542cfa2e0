"""A pair of CURVE keys, in ZeroMQ's text form."""

from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

KEY_CHARS: Final = 40
"""32 bytes in Z85."""

CurveKey = Annotated[str, Meta(min_length=KEY_CHARS, max_length=KEY_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Both halves of one pair. The secret half proves the identity of its holder."""

    public: CurveKey
    secret: CurveKey = field(repr=False)
