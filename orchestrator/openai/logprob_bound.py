"""How many log-probabilities one request may bring: each takes a hundred times a token's room."""

from typing import Final

from mlx_dp.orchestrator.openai.errors import invalid
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.proto.admission import AdmissionLimits, answer_tokens

MAX_LOGPROBS: Final = 2**20
"""Of all answers to one request together; as JSON they are 60 to 100 MB."""


def refuse_many_logprobs(
    fields: GenerationFields, answers: int, num_top: int | None, limits: AdmissionLimits | None
) -> None:
    """Raise ApiError when a request may bring more than ``MAX_LOGPROBS``."""
    tokens = fields.answer_tokens
    if num_top is None or tokens is None:
        return
    if limits is not None:
        # No answer is longer, whatever is asked for.
        tokens = answer_tokens(limits, 1, tokens)
    asked = answers * tokens * (num_top + 1)
    if asked > MAX_LOGPROBS:
        name = fields.answer_tokens_name
        raise invalid(
            name,
            f"{answers} answers of {tokens} tokens with {num_top + 1} log-probabilities each may "
            f"bring {asked} of them, at most {MAX_LOGPROBS} are allowed: "
            f"{_most_tokens(answers, num_top)} tokens fit, or ask for fewer answers or "
            "alternatives",
        )


def default_answer_tokens(
    answers: int, num_top: int | None, limits: AdmissionLimits | None, prompt_tokens: int
) -> int | None:
    """The bound of an answer that the client has set none for; None: what is left of the context.

    Hardly any answer comes near it, so it is no reason to refuse one.
    """
    if num_top is None:
        return None
    most = _most_tokens(answers, num_top)
    if limits is not None and answer_tokens(limits, prompt_tokens) <= most:
        return None
    return most


def _most_tokens(answers: int, num_top: int) -> int:
    return MAX_LOGPROBS // (answers * (num_top + 1))
