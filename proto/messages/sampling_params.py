"""Sampling parameters of one request."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Final

from msgspec import Meta

from mlx_dp.proto.fields import TokenId

MAX_LOGIT_BIAS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_SEED: Final = 2**63 - 1
MAX_MIN_TOKENS: Final = 2**20
"""The longest request, see ``fields.MAX_REQUEST_TOKENS``."""
GREEDY_BELOW: Final = 1e-5
"""Below this temperature the best token is chosen: dividing logits by it would overflow float32."""
MODEL_DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
"""The parameters for which a model's generation_config.json may have a default."""


def require_finite(*values: float) -> None:
    """Raise ValueError for NaN and infinities, which bounds alone let through."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, in the ecosystem's names, with their bounds.

    The order is: min_tokens, logit_bias, penalties, temperature, then top_k, top_p and min_p on
    the distribution at that temperature (as vLLM and SGLang do; mlx-lm filters at temperature 1).
    Penalties count as in OpenAI and vLLM: repetition over prompt and answer, presence and
    frequency over the answer alone. A draw depends only on ``seed`` and the position, not on the
    batch or the worker.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...],
        Meta(max_length=MAX_LOGIT_BIAS),
    ] = ()
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """None: no log-probabilities; n: the chosen token's and the n best."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_MIN_TOKENS)] = 0
    """No stop token is drawn before the answer has this many tokens, those of an earlier owner
    included, unless a grammar leaves nothing else."""

    def __post_init__(self) -> None:
        own = (getattr(self, field.name) for field in fields(self))
        require_finite(
            *(value for value in own if isinstance(value, float)),
            *(bias for _, bias in self.logit_bias),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
