"""The bytes of single tokens, by kind of tokenizer."""

from collections.abc import Mapping
from typing import Final


def _bytes_of_characters() -> dict[str, int]:
    # GPT-2's table: printable bytes map to themselves, the others to U+0100 and up.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER: Final[Mapping[str, int]] = _bytes_of_characters()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of one token, as in the ByteLevel decoder of ``tokenizers``."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # An added token with other characters is plain text.
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of one SentencePiece token. ``<0x0A>`` is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()
