"""The choices of a request: one generation each, and the text that it becomes."""

import random
from collections.abc import Iterator, Sequence

from mlx_dp.orchestrator.api import Generation
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.http.preparation.sampling import (
    default_answer_tokens,
    sampling_params,
    stop_token_ids,
)
from mlx_dp.orchestrator.http.stream.choice_streams import Choice
from mlx_dp.orchestrator.text.choice_text import ChoiceText
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.orchestrator.text.text_model import TextModel
from mlx_dp.proto.capacity.request_limits import AdmissionLimits
from mlx_dp.proto.messages.sampling_params import MAX_SEED


def choices(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    text: TextModel,
    limits: AdmissionLimits | None,
    *,
    rank: int | None,
    label: str,
) -> Iterator[Choice]:
    """Yield the choices, in order of prompts."""
    stops = stop_token_ids(request, text.facts.eos_token_ids)
    skip = request.skip_special_tokens
    for ids in prompts:
        max_tokens = request.max_tokens
        if max_tokens is None:
            max_tokens = default_answer_tokens(request, limits, len(ids))
        for choice in range(request.choices_per_prompt):
            seed = choice_seed(request.sampling.seed, choice)
            params = sampling_params(request, text.facts.sampling, seed=seed)
            yield Choice(
                Generation(
                    prompt_ids=ids,
                    max_tokens=max_tokens,
                    stop_token_ids=stops,
                    params=params,
                    routed_dp_rank=rank,
                    cache_salt=request.cache_salt,
                    grammar=None if request.grammar is None else request.grammar.grammar,
                    label=label,
                ),
                ChoiceText(
                    text.detokenizer(skip_special_tokens=skip),
                    StopStrings(request.stop),
                    frozenset(stops),
                    text.special_text,
                    skip_special_tokens=skip,
                    min_tokens=params.min_tokens,
                    shows_ids=request.shows_token_ids,
                ),
            )


def choice_seed(seed: int | None, choice: int) -> int:
    """Return the seed of one choice: choices of a prompt differ, equal requests do not."""
    return random.getrandbits(63) if seed is None else (seed + choice) & MAX_SEED
