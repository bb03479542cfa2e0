"""One admission arithmetic, for the edge that refuses and for the owner that admits."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.proto.fields import MAX_REQUEST_TOKENS

NEXT_ANSWER_TOKENS: Final = 256
"""Tokens of an answer for which a request has KV set aside at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What bounds a single request on one owner. ``pool_tokens`` None: no token pool."""

    context_length: int
    pool_tokens: int | None

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can ever have."""
        most = min(self.context_length, MAX_REQUEST_TOKENS)
        if self.pool_tokens is None:
            return most
        return min(most, self.pool_tokens + 1)


def default_max_tokens(limits: AdmissionLimits, prompt_tokens: int) -> int:
    """The answer's length when the client sets none: what is left. At least 1."""
    return max(1, limits.max_request_tokens - prompt_tokens)


def reserved_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """KV tokens that an owner sets aside for a request.

    The last token drawn is never fed back, so it needs no KV.
    """
    return prompt_tokens + max_tokens - 1


def next_tokens(held_tokens: int, left_tokens: int) -> int:
    """KV tokens that a request needs next: those it has, and room for the next of its answer.

    Most answers end long before ``max_tokens``, so that owners would stand half empty if all of it
    were set aside. Never more than ``reserved_tokens``, with ``left_tokens`` of the answer to come.
    """
    return held_tokens + min(left_tokens, NEXT_ANSWER_TOKENS) - 1


def refusal(limits: AdmissionLimits, prompt_tokens: int, max_tokens: int) -> str | None:
    """Say why a request can never run here, in the caller's terms, or None when it can."""
    if prompt_tokens < 1:
        return "the prompt is empty: at least 1 token is needed"
    if max_tokens < 1:
        return f"max_tokens is {max_tokens}: at least 1 is needed"
    total = prompt_tokens + max_tokens
    if total > limits.context_length:
        return (
            f"this model's maximum context length is {limits.context_length} tokens, but the "
            f"request needs {total} ({prompt_tokens} in the prompt, {max_tokens} for the answer)"
        )
    if total > MAX_REQUEST_TOKENS:
        return (
            f"one request may have {MAX_REQUEST_TOKENS} tokens, but this one needs {total} "
            f"({prompt_tokens} in the prompt, {max_tokens} for the answer)"
        )
    reserved = reserved_tokens(prompt_tokens, max_tokens)
    if limits.pool_tokens is not None and reserved > limits.pool_tokens:
        return (
            f"one worker holds {limits.pool_tokens} KV tokens, but the request needs {reserved} "
            f"({prompt_tokens} in the prompt, {max_tokens} for the answer, whose last token needs "
            "none)"
        )
    return None
