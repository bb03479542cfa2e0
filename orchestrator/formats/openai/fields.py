"""Fields of both completion routes, each with its bounds. Null means the default."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from mlx_dp.orchestrator.formats.common.validation import (
    INTEGRAL,
    MINUS_ONE_IS_UNSET,
    MINUS_ONE_IS_ZERO,
    STRICT,
    TOKEN_BOUND,
    ZERO_IS_UNSET,
    refuse,
)
from mlx_dp.orchestrator.formats.openai.structured_fields import (
    Alternatives,
    GrammarText,
    OptionalSchema,
    ResponseFormat,
    StructuredOutputs,
)
from mlx_dp.proto.fields import MAX_CACHE_SALT_CHARS
from mlx_dp.proto.messages.sampling_params import MAX_LOGIT_BIAS, MAX_MIN_TOKENS, MAX_SEED

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_RANK: Final = 2**20
MIN_SEED: Final = -(2**63)
NEUTRAL_SAMPLING: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "early_stopping": (None, False),
        "min_new_tokens": (None, 0),
        "max_new_tokens": (None,),
        "no_repeat_ngram_size": (None, 0),
        "top_n_sigma": (None, -1, 0),
        "bad_words": (None, [], {}, ""),
        "allowed_token_ids": (None, [], {}, ""),
        "logits_processors": (None, [], {}, ""),
        "custom_logit_processor": (None, [], {}, ""),
        "custom_params": (None, [], {}, ""),
        "typical_p": (None, 1),
        "top_a": (None, 0),
        "tfs": (None, 1),
        "mirostat": (None, 0),
        "xtc_probability": (None, 0),
        "dry_multiplier": (None, 0),
        "dynatemp_range": (None, 0),
    }
)
"""Sampling parameters that this server lacks, with the values that change nothing."""

_TOKEN_ID_KEY: Final = re.compile(r"[0-9]{1,10}")


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refuse("input should be a string or an array of strings")
    # Some clients send empty strings for unused fields.
    stops = list(dict.fromkeys(filter(None, stops)))
    if len(stops) > MAX_STOPS:
        raise refuse(f"input should have at most {MAX_STOPS} strings")
    for stop in stops:
        if len(stop) > MAX_STOP_CHARS:
            raise refuse(f"each stop string should have at most {MAX_STOP_CHARS} characters", stop)
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, dict):
        raise refuse("input should be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise refuse(f"input should have at most {MAX_LOGIT_BIAS} members")
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID_KEY.fullmatch(key):
            raise refuse('keys should be token ids, such as "42"', key)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refuse(f"the bias of token {key} should be a number from -100 to 100", bias)
        found[int(key)] = float(bias)
    return tuple(found.items())


Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "maxLength": MAX_STOP_CHARS},
                },
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": MAX_LOGIT_BIAS,
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "array", "maxItems": 0},
                {"type": "null"},
            ]
        }
    ),
]
# More than the model has left is clamped: clients send a huge number to get all of it.
AnswerTokens = Annotated[Annotated[int, Field(ge=-1, le=2**63 - 1), INTEGRAL] | None, TOKEN_BOUND]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANK), INTEGRAL]


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool | None = None
    """Usage of the whole request, in a separate event before the end."""
    continuous_usage_stats: bool | None = None
    """Usage of a choice so far, in every event of it."""


class CompletionFields(BaseModel):
    """Fields of chat and text completions. Unknown ones are in ``extras``, see unsupported.py."""

    model_config = STRICT

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AnswerTokens = None
    max_completion_tokens: AnswerTokens = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_MIN_TOKENS), INTEGRAL] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL, MINUS_ONE_IS_ZERO] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Annotated[float, Field(ge=0, le=100)] | None, ZERO_IS_UNSET] = (
        None
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias = ()
    seed: Annotated[
        Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED), INTEGRAL] | None, MINUS_ONE_IS_UNSET
    ] = None
    stop: Stops = ()
    stop_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), INTEGRAL]],
            Field(max_length=MAX_STOP_TOKEN_IDS),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: OptionalSchema = None
    guided_regex: GrammarText = None
    guided_choice: Alternatives = None
    guided_grammar: GrammarText = None
    json_schema: OptionalSchema = None
    regex: GrammarText = None
    grammar: GrammarText = None
    routed_dp_rank: Rank | None = None
    data_parallel_rank: Rank | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def answer_tokens(self) -> int | None:
        """The bound of the answer. The newer name takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def answer_tokens_name(self) -> str:
        """The field that ``answer_tokens`` comes from."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def extras(self) -> dict[str, Any]:
        """Undeclared fields."""
        return self.model_extra or {}
