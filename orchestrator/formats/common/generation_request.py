"""A request for text as every API format states it: what to generate, in neutral terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from mlx_dp.orchestrator.text.text_model import Chat
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.sampling_params import SamplingParams

Prompt = str | tuple[int, ...]
"""Text, in which special tokens count as such, or token ids."""

# Resolved from fields of GenerationRequest, or apart for each choice.
_NOT_GIVEN_AS_SUCH: Final = frozenset({"seed", "logprobs", "min_tokens"})
SAMPLING_NAMES: Final = tuple(
    each.name for each in fields(SamplingParams) if each.name not in _NOT_GIVEN_AS_SUCH
)
"""The sampling parameters that a client may give, by their names in ``SamplingParams``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """The client's names of fields that errors mention."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    num_choices: str = "n"

    def client_name(self, param: str) -> str:
        """Translate our own name of a field into the client's."""
        return {"prompt": self.prompt, "max_tokens": self.max_tokens}.get(param, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGrammar:
    """A grammar, and the field that asked for it."""

    param: str
    grammar: Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRank:
    """The owner that must serve a request, and the field that asked for it."""

    param: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSampling:
    """Sampling as the client asked for it."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """Values by ``SAMPLING_NAMES``. Absent ones are the model's defaults."""
    seed: int | None = None
    """None: a random one for each choice."""

    @classmethod
    def from_body(cls, body: object, *, seed: int | None) -> "RequestedSampling":
        """Return the values of a body whose fields have the names of ``SamplingParams``."""
        values = {name: getattr(body, name, None) for name in SAMPLING_NAMES}
        given = {name: value for name, value in values.items() if value is not None}
        return cls(given=given, seed=seed)

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        bias: tuple[tuple[int, float], ...] = self.given.get("logit_bias", ())
        return bias


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request in neutral terms, the same for every API format.

    Its fields are within their own bounds. What depends on the model or on the load is checked
    later: token ids against the vocabulary, lengths against the context, the rank's state.
    """

    prompts: Sequence[Prompt | Chat]
    model: str | None = None
    """None: the served one."""
    choices_per_prompt: int = 1
    stream: bool = False
    max_tokens: int | None = None
    """None: the rest of the context."""
    min_tokens: int = 0
    sampling: RequestedSampling = field(default_factory=RequestedSampling)
    num_logprobs: int | None = None
    """Alternatives at each token; 0 is the token's own log-probability alone, None is nothing."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    grammar: RequestedGrammar | None = None
    ranks: Sequence[RequestedRank] = ()
    """Every field that names an owner. They must agree, unless a header overrides them."""
    shows_token_ids: bool = False
    """The response has the ids of prompt and answer."""
    shows_prompt: bool = False
    """The response begins with the text of the prompt."""
    names: FieldNames = field(default_factory=FieldNames)

    @property
    def num_choices(self) -> int:
        """Answers to all prompts together."""
        return len(self.prompts) * self.choices_per_prompt
