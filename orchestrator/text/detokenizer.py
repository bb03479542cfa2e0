"""Incremental detokenization: the pieces join to the same text as decoding all at once."""

import codecs
from collections.abc import Callable, Iterable
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
# A UTF-8 sequence has at most 4 bytes. More unfinished byte tokens in a row are not a character,
# and waiting longer would only grow the window.
MAX_UNFINISHED_TOKENS: Final = 8


class Detokenizer(Protocol):
    """The text of one choice. It lives as long as the request, across owners."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete. An unfinished character is held back."""

    def finish(self) -> str:
        """Return the text held back, with unfinished bytes as U+FFFD. No ``push`` may follow."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes. Exact for every sequence of tokens.

    ``shown_bytes`` returns b"" for hidden tokens.
    """

    def __init__(self, shown_bytes: Callable[[int], bytes]) -> None:
        self._shown_bytes = shown_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._shown_bytes, ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a window of the last tokens, and returns its growth.

    The window starts at the tokens shown last, since a decoder may treat its first token
    differently (SentencePiece drops a leading space). ``decode``: the tokenizer's own; ``hidden``:
    whether it leaves a token out.
    """

    def __init__(self, decode: Callable[[list[int]], str], hidden: Callable[[int], bool]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._shown: list[int] = []
        self._shown_text = ""
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        # One by one, since a long window would decode each of its tokens again.
        return "".join([self._push_one(token) for token in ids if not self._hidden(token)])

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._shown + self._pending)
        unfinished = text.endswith(REPLACEMENT) and len(self._pending) < MAX_UNFINISHED_TOKENS
        if unfinished or len(text) <= len(self._shown_text):
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)
        return new

    def finish(self) -> str:
        if not self._pending:
            return ""
        return self._show(self._decode(self._shown + self._pending))
