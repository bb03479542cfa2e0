"""Compiles a grammar from stdin, and prints what is wrong with it. Runs as a separate process.

The compiler recurses with the depth of a grammar, and can take minutes for a short one. Neither may
happen in the controller or in a worker.
"""

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.grammar_source import guidance_limits, guidance_source

COMPILE_LIMIT_S: Final = 2
# A quarter of the stack of a worker's main thread, so a grammar that passes here is safe there.
STACK_NBYTES: Final = 2 * 2**20


class _Bytes:
    """The smallest tokenizer: every byte is a token."""

    eos_token_id: Final = 256
    bos_token_id: Final = None
    special_token_ids: Final[Sequence[int]] = (256,)
    tokens: Final[Sequence[bytes]] = (*(bytes([byte]) for byte in range(256)), b"<|end|>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def grammar_fault(grammar: Grammar) -> str:
    """Return the library's error message, or an empty string."""
    try:
        source = guidance_source(grammar)
    except ValueError as error:
        return str(error)
    limits = guidance_limits()
    wrong, words = LLMatcher.validate_grammar_with_warnings(source, limits=limits)
    if wrong:
        return words[0]
    if any("no tokenizer" in warning for warning in words):
        return "it names tokens, which are not text: use strings and patterns"
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def main() -> None:
    # The default action ends the process even while it runs library code.
    signal.alarm(COMPILE_LIMIT_S)
    grammar = msgspec.json.decode(sys.stdin.buffer.read(), type=Grammar)
    threading.stack_size(STACK_NBYTES)
    thread = threading.Thread(target=lambda: print(grammar_fault(grammar)))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
