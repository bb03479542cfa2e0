"""From request fields to sampling parameters; ids are checked against the model's table."""

from collections.abc import Iterable

from mlx_dp.orchestrator.openai.errors import invalid
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.text.text_model import SamplingDefaults
from mlx_dp.proto.fields import MAX_STOP_TOKEN_IDS
from mlx_dp.proto.sampling_params import SamplingParams


def sampling_params(
    fields: GenerationFields, defaults: SamplingDefaults, *, seed: int, logprobs: int | None
) -> SamplingParams:
    """The client's values, else the model's, else neutral ones."""
    top_k = defaults.top_k if fields.top_k is None else max(0, fields.top_k)
    return SamplingParams(
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=top_k,
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=fields.logit_bias,
        seed=seed,
        logprobs=logprobs,
        min_tokens=fields.min_tokens or 0,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def refuse_impossible_lengths(fields: GenerationFields) -> None:
    """Raise ApiError when an answer would have to be longer than it may be."""
    least, most = fields.min_tokens, fields.answer_tokens
    if least is not None and most is not None and least > most:
        raise invalid(
            "min_tokens",
            f"{least} is more than {fields.answer_tokens_name} ({most}): use at most {most}",
        )


def stop_token_ids(fields: GenerationFields, eos: Iterable[int]) -> tuple[int, ...]:
    """The ids that end the answer: the model's own, unless ignored, and the client's."""
    own = () if fields.ignore_eos else tuple(eos)
    return tuple(dict.fromkeys((*own, *(fields.stop_token_ids or ()))))[:MAX_STOP_TOKEN_IDS]


def check_token_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise ApiError for an id past the model's table: MLX would read foreign memory."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(param, f"token id {highest} is not below the vocabulary size {vocab_size}")
