"""Bounds the log-probabilities of one request: each takes a hundred times a token's memory."""

from typing import Final

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens

MAX_LOGPROBS: Final = 2**20
"""Of all answers to one request together; as JSON they are 60 to 100 MB."""


def refuse_many_logprobs(request: GenerationRequest, limits: AdmissionLimits | None) -> None:
    """Raise ApiError when the answers may have more than ``MAX_LOGPROBS``."""
    answers, num_top, tokens = request.num_choices, request.num_logprobs, request.max_tokens
    if num_top is None or tokens is None:
        return
    if limits is not None:
        # The context bounds an answer, whatever the client asks for.
        tokens = answer_tokens(limits, 1, tokens)
    asked = answers * tokens * (num_top + 1)
    if asked > MAX_LOGPROBS:
        raise invalid(
            request.names.max_tokens,
            f"{answers} answers of {tokens} tokens with {num_top + 1} log-probabilities each may "
            f"bring {asked} of them, at most {MAX_LOGPROBS} are allowed: "
            f"{_most_tokens(answers, num_top)} tokens fit, or ask for fewer answers or "
            "alternatives",
        )


def default_answer_tokens(
    request: GenerationRequest, limits: AdmissionLimits | None, prompt_tokens: int
) -> int | None:
    """Bound an answer without ``max_tokens``. None: the rest of the context.

    Hardly any answer reaches the bound, so it is no reason to refuse one.
    """
    if request.num_logprobs is None:
        return None
    most = _most_tokens(request.num_choices, request.num_logprobs)
    if limits is not None and answer_tokens(limits, prompt_tokens) <= most:
        return None
    return most


def _most_tokens(answers: int, num_top: int) -> int:
    return MAX_LOGPROBS // (answers * (num_top + 1))
