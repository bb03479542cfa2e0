"""From a checked request to the answers that are to be generated."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_dp.orchestrator.http.exchange import Choice
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.openai.logprob_bound import default_answer_tokens
from mlx_dp.orchestrator.openai.sampling import sampling_params, stop_token_ids
from mlx_dp.orchestrator.service import Generation
from mlx_dp.orchestrator.text.choice_text import ChoiceText
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.orchestrator.text.text_model import TextModel
from mlx_dp.proto.admission import AdmissionLimits
from mlx_dp.proto.grammar import Grammar
from mlx_dp.proto.sampling_params import MAX_SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A checked request: what to generate, and how to write it."""

    fields: GenerationFields
    prompts: Sequence[tuple[int, ...]]
    logprobs: int | None
    rank: int | None
    grammar: Grammar | None
    label: str

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.fields.choices


def choices(work: Work, text: TextModel, limits: AdmissionLimits | None) -> Iterator[Choice]:
    """Yield the answers to generate, those to one prompt behind each other."""
    fields = work.fields
    stops = stop_token_ids(fields, text.facts.eos_token_ids)
    skip = fields.skip_special_tokens is not False
    for ids in work.prompts:
        max_tokens = fields.answer_tokens
        if max_tokens is None:
            max_tokens = default_answer_tokens(work.num_choices, work.logprobs, limits, len(ids))
        for choice in range(fields.choices):
            params = sampling_params(
                fields,
                text.facts.sampling,
                seed=choice_seed(fields.seed, choice),
                logprobs=work.logprobs,
            )
            yield Choice(
                Generation(
                    prompt_ids=ids,
                    max_tokens=max_tokens,
                    stop_token_ids=stops,
                    params=params,
                    routed_dp_rank=work.rank,
                    cache_salt=fields.cache_salt or "",
                    grammar=work.grammar,
                    label=work.label,
                ),
                ChoiceText(
                    text.detokenizer(skip_special_tokens=skip),
                    StopStrings(fields.stop),
                    frozenset(stops),
                    text.special_text,
                    skip_special_tokens=skip,
                    min_tokens=params.min_tokens,
                    shows_ids=bool(fields.return_token_ids),
                ),
            )


def choice_seed(seed: int | None, choice: int) -> int:
    """The seed of one choice: alternatives to one prompt differ, equal requests do not."""
    return random.getrandbits(63) if seed is None else (seed + choice) & MAX_SEED
