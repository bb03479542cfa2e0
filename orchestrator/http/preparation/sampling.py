"""Resolves a request's sampling with the model's defaults, and checks its token ids."""

from collections.abc import Iterable

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.text.text_model import SamplingDefaults
from mlx_dp.proto.fields import MAX_STOP_TOKEN_IDS
from mlx_dp.proto.messages.sampling_params import SamplingParams


def sampling_params(
    request: GenerationRequest, defaults: SamplingDefaults, *, seed: int
) -> SamplingParams:
    """Return the client's values, else the model's, else neutral ones."""
    asked = request.sampling
    return SamplingParams(
        temperature=_or(asked.temperature, defaults.temperature),
        top_p=_or(asked.top_p, defaults.top_p),
        top_k=defaults.top_k if asked.top_k is None else max(0, asked.top_k),
        min_p=_or(asked.min_p, 0.0),
        repetition_penalty=_or(asked.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(asked.presence_penalty, 0.0),
        frequency_penalty=_or(asked.frequency_penalty, 0.0),
        logit_bias=asked.logit_bias,
        seed=seed,
        logprobs=request.num_logprobs,
        min_tokens=request.min_tokens,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


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
