"""Resolves how a request is sampled, and refuses what this model or server cannot do."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.http.body.limits import ConcurrencyLimit
from mlx_dp.orchestrator.text.grammar_check import GrammarCheck
from mlx_dp.orchestrator.text.text_model import ModelFacts
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens
from mlx_dp.proto.fields import MAX_STOP_TOKEN_IDS
from mlx_dp.proto.messages.sampling_params import SamplingParams

MAX_LOGPROBS: Final = 2**20
"""Of all answers to one request together; as JSON they are 60 to 100 MB."""


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, *, seed: int
) -> SamplingParams:
    """Return the client's values, else the model's, else neutral ones."""
    return replace(
        defaults,
        **request.sampling.given,
        seed=seed,
        logprobs=request.num_logprobs,
        min_tokens=request.min_tokens,
    )


def refuse_impossible_lengths(request: GenerationRequest) -> None:
    """Raise ApiError when an answer would have to be longer than it may be."""
    least, most = request.min_tokens, request.max_tokens
    if most is not None and least > most:
        raise invalid(
            "min_tokens",
            f"{least} is more than {request.names.max_tokens} ({most}): use at most {most}",
        )


def stop_token_ids(request: GenerationRequest, eos: Iterable[int]) -> tuple[int, ...]:
    """Return the ids that end an answer: the model's own, unless ignored, and the client's."""
    own = () if request.ignore_eos else tuple(eos)
    return tuple(dict.fromkeys((*own, *request.stop_token_ids)))[:MAX_STOP_TOKEN_IDS]


def check_token_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise ApiError for an id past the model's table: MLX would read foreign memory."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(param, f"token id {highest} is not below the vocabulary size {vocab_size}")


def refuse_many_logprobs(request: GenerationRequest, limits: AdmissionLimits | None) -> None:
    """Raise ApiError when the answers may have more than ``MAX_LOGPROBS``.

    Each takes a hundred times a token's memory.
    """
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


async def check_grammar(
    request: GenerationRequest,
    facts: ModelFacts,
    grammars: GrammarCheck,
    limit: ConcurrencyLimit,
) -> None:
    """Raise ApiError when the model cannot follow the requested grammar, before it is queued.

    ``limit`` bounds the requests that wait for a grammar which is not known yet.
    """
    if request.grammar is None:
        return
    param, grammar = request.grammar.param, request.grammar.grammar
    if not facts.follows_grammars:
        raise invalid(
            param,
            "the fake engine supports no grammars: leave it out",
            code="unsupported_parameter",
        )
    if not stop_token_ids(request, facts.eos_token_ids):
        raise invalid(param, "this model has no end-of-sequence token: set stop_token_ids")
    if grammars.knows(grammar):
        fault = await grammars.fault(grammar)
    else:
        async with limit.enter():
            fault = await grammars.fault(grammar)
    if fault is not None:
        raise invalid(param, fault, code="invalid_grammar")
