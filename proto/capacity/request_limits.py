"""The limits of one request: the same arithmetic for the controller and for the owner."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.proto.fields import MAX_REQUEST_TOKENS

NEXT_ANSWER_TOKENS: Final = 256
"""The number of answer tokens for which KV is set aside at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The limits of a single request on one owner. ``pool_tokens`` None: no token pool."""

    context_length: int
    pool_tokens: int | None

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can have."""
        most = min(self.context_length, MAX_REQUEST_TOKENS)
        if self.pool_tokens is None:
            return most
        return min(most, self.pool_tokens + 1)


def answer_tokens(limits: AdmissionLimits, prompt_tokens: int, asked: int | None = None) -> int:
    """Return the longest answer: at most what the client asks for and the prompt leaves, at least
    1.
    """
    left = max(1, limits.max_request_tokens - prompt_tokens)
    return left if asked is None else min(asked, left)


def fits(limits: AdmissionLimits, prompt_tokens: int, max_tokens: int = 1) -> bool:
    """Whether prompt and answer together are within the limits."""
    return prompt_tokens + max_tokens <= limits.max_request_tokens


def reserved_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Return the KV tokens that an owner sets aside for a request.

    The last token drawn is never fed back, so it needs no KV.
    """
    return prompt_tokens + max_tokens - 1


def next_tokens(held_tokens: int, left_tokens: int) -> int:
    """Return the KV tokens that a request needs next: its tokens and the next part of its answer.

    Most answers end long before ``max_tokens``; setting all of it aside would leave owners half
    empty. The result never exceeds ``reserved_tokens``; ``left_tokens`` of the answer remain.
    """
    return held_tokens + min(left_tokens, NEXT_ANSWER_TOKENS) - 1


def refusal(limits: AdmissionLimits, prompt_tokens: int, max_tokens: int) -> str | None:
    """Return why a request can never run here, in the caller's terms, or None."""
    if prompt_tokens < 1:
        return "the prompt is empty: at least 1 token is needed"
    if max_tokens < 1:
        return f"max_tokens is {max_tokens}: at least 1 is needed"
    if fits(limits, prompt_tokens, max_tokens):
        return None
    if not fits(limits, prompt_tokens):
        return prompt_overflow(limits, f"{prompt_tokens} tokens")
    return _overflow(
        limits,
        f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, "
        f"{max_tokens} in the completion). Please reduce the length of the messages or completion.",
    )


def prompt_overflow(limits: AdmissionLimits, size: str) -> str:
    """Return the error for a prompt that leaves no room for an answer."""
    return _overflow(
        limits,
        f"your messages resulted in {size}, and the completion needs at least 1. Please reduce "
        "the length of the messages.",
    )


def _overflow(limits: AdmissionLimits, excess: str) -> str:
    """Return the error in OpenAI's wording, which vLLM uses too: clients parse it to shorten a
    prompt.

    The limit is the effective one, from the model or from the pool.
    """
    most = limits.max_request_tokens
    said = f"This model's maximum context length is {most} tokens. However, {excess}"
    if limits.pool_tokens is None or most <= limits.pool_tokens:
        return said
    return f"{said} (One worker holds {limits.pool_tokens} KV tokens.)"
