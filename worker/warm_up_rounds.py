"""The warm-up's requests: at least one for each form of a step in service.

The first use of a kernel compiles it, which takes seconds on Metal. A kernel belongs to an
operation, its element types and, roughly, a power of two of its size: so each form is run once, not
every combination of forms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from mlx_dp.proto.messages.sampling_params import SamplingParams

MAX_WIDTH: Final = 32
"""Rows of the widest batch. A wider one runs the kernels of this one."""
ALONE_TOKENS: Final = 512
"""Prompt tokens of a step with nothing to decode."""
MIXED_TOKENS: Final = 32
"""Prompt tokens of a step that decodes as well, so that they share its forward pass."""
LONG_TOKENS: Final = 1_100
"""Metal uses other attention kernels for more than 1,024 tokens."""

_EPOCH: Final = 1
_GREEDY: Final = SamplingParams(temperature=0.0)
_LETTERS: Final = Grammar(kind=GrammarKind.REGEX, text="[a-z ]{4,64}")
_PENALTIES: Final = SamplingParams(
    temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
)
_ALL: Final = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=3,
    min_tokens=2,
)
SAMPLINGS: Final = (
    _GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    _PENALTIES,
    SamplingParams(temperature=0.0, logit_bias=((0, 1.0),)),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.0, min_tokens=2),
    _ALL,
)
"""Each sampling parameter alone, and all together."""
ALONE: Final = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=20),
    _ALL,
)
"""Samplings that run other kernels when all rows of the batch have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpRound:
    """Requests that run together.

    ``companions`` start first, decode beside the others, and are aborted when the others are done.
    A wave is submitted once the prompts of the wave before are complete. ``budget``: prompt tokens
    per step. ``dispensable``: it may take no longer than all rounds before it.
    """

    name: str
    waves: tuple[tuple[Submit, ...], ...]
    companions: tuple[Submit, ...] = ()
    budget: int = ALONE_TOKENS
    dispensable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpScope:
    """The limits of the rounds: concurrent rows, and tokens of a request."""

    shape: ModelShape
    request_slots: int
    max_request_tokens: int

    @property
    def width(self) -> int:
        return min(self.request_slots, MAX_WIDTH)


def warm_up_rounds(scope: WarmUpScope) -> Iterator[WarmUpRound]:
    """Yield the rounds, the most needed first."""
    make = _Requests(scope)
    yield from _sampling_rounds(make, scope.width)
    yield _mixed_round(make)
    yield _prefix_round(make)
    yield _width_round(make, scope.width)
    yield _long_round(make, scope.shape)


class _Requests:
    """Makes requests within the limits, with numbers and prompts of their own."""

    def __init__(self, scope: WarmUpScope) -> None:
        self._scope = scope
        self._ids = count(1)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Return tokens that no other prompt begins with, so that the prefix cache has none."""
        vocab_size = self._scope.shape.vocab_size
        first = 97 * next(self._ids)
        return tuple((first + place) % vocab_size for place in range(num_tokens))

    def request(
        self,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        params: SamplingParams = _GREEDY,
        *,
        output_ids: tuple[int, ...] = (),
        grammar: Grammar | None = None,
    ) -> Submit:
        most = self._scope.max_request_tokens
        max_tokens = max(len(output_ids) + 1, min(max_tokens, most // 2))
        return Submit(
            request_id=next(self._ids),
            epoch=_EPOCH,
            prompt_ids=prompt_ids[: max(1, most - max_tokens)],
            output_ids=output_ids,
            max_tokens=max_tokens,
            # Only grammars and min_tokens use it, and it hardly ever ends an answer.
            stop_token_ids=(self._scope.shape.vocab_size - 1,),
            params=params,
            grammar=grammar,
        )


def _sampling_rounds(make: _Requests, width: int) -> Iterator[WarmUpRound]:
    """Every sampling in a mixed batch, then those that run other kernels alone."""
    mixed = [make.request(make.prompt(1 + place), 3, p) for place, p in enumerate(SAMPLINGS)]
    mixed.append(make.request(make.prompt(4), 3, grammar=_LETTERS))
    replayed = make.request(make.prompt(5), 6, _PENALTIES, output_ids=(0, 1))
    mixed.append(replayed)
    for start in range(0, len(mixed), max(2, width)):
        together = tuple(mixed[start : start + max(2, width)])
        yield WarmUpRound(name="samplings in one batch", waves=(together,))
    for params in ALONE:
        grammar = _LETTERS if params is _ALL else None
        request = make.request(make.prompt(4), 3, params, grammar=grammar)
        yield WarmUpRound(name="a sampling alone", waves=((request,),))


def _mixed_round(make: _Requests) -> WarmUpRound:
    """A prompt in chunks beside rows of two slabs."""
    return WarmUpRound(
        name="a prompt in chunks beside rows that decode",
        companions=(
            make.request(make.prompt(5), 200),
            # Its expected length exceeds the first width of slabs.
            make.request(make.prompt(70), 600),
        ),
        waves=((make.request(make.prompt(150), 2),),),
        budget=MIXED_TOKENS,
    )


def _prefix_round(make: _Requests) -> WarmUpRound:
    """A prompt from the prefix cache, and one that shares only its beginning."""
    prompt = make.prompt(150)
    parting = (*prompt[:100], *make.prompt(50))
    return WarmUpRound(
        name="prompts from the prefix cache",
        waves=(
            (make.request(prompt, 2),),
            (make.request(prompt, 2), make.request(parting, 2)),
        ),
    )


def _width_round(make: _Requests, width: int) -> WarmUpRound:
    """One batch that halves with each step, from the widest to a single row."""
    rows = (
        make.request(make.prompt(3 + place % 5), (width // (place + 1)).bit_length())
        for place in range(width)
    )
    return WarmUpRound(name="batches of all widths", waves=(tuple(rows),))


def _long_round(make: _Requests, shape: ModelShape) -> WarmUpRound:
    """A prompt longer than every window that a long prompt can fill."""
    tokens = max((w.tokens + 1 for w in shape.windows if w.tokens <= 2 * LONG_TOKENS), default=0)
    request = make.request(make.prompt(max(LONG_TOKENS, tokens)), 3)
    return WarmUpRound(name="a long prompt", waves=((request,),), dispensable=True)
