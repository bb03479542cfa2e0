"""Bounded types that several messages share. The codec enforces the bounds on arrival."""

from typing import Annotated, Final

from msgspec import Meta

MAX_REQUEST_TOKENS: Final = 2**20
"""Prompt and answer of one request together; a frame holds as many token ids."""
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TEXT_CHARS: Final = 4096
MAX_CACHE_SALT_CHARS: Final = 256
MAX_GRAMMAR_CHARS: Final = 2**16
MAX_WARNINGS: Final = 16

MAX_TOKEN_ID: Final = 2**31 - 1
"""MLX holds token ids as int32."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Epoch = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Warnings = Annotated[tuple[Text, ...], Meta(max_length=MAX_WARNINGS)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_REQUEST_TOKENS)]


def clip_text(text: str) -> str:
    """Return any text in a form that a ``Text`` field and UTF-8 accept, cut at its end.

    An error text of a library has no bound, and a file name need not be UTF-8.
    """
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(clean) <= MAX_TEXT_CHARS:
        return clean
    return f"{clean[: MAX_TEXT_CHARS - 3]}..."
