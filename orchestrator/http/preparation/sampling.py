"""Resolves a request's sampling with the model's defaults, and checks its token ids."""

from collections.abc import Iterable
from dataclasses import replace

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.proto.fields import MAX_STOP_TOKEN_IDS
from mlx_dp.proto.messages.sampling_params import SamplingParams


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
