"""A worker accepts every field value that HTTP accepts; a dropped frame would hang a client.

The bounds stand once in the request's fields, where they make a readable 400, and once in the
messages, where they protect the worker.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args, get_type_hints

import annotated_types
import msgspec
import pytest
from pydantic import ValidationError

from mlx_dp.orchestrator.formats.openai.completion_request import CompletionRequest
from mlx_dp.orchestrator.formats.openai.openai_format import TextCompletion
from mlx_dp.orchestrator.http.preparation.choices import choice_seed
from mlx_dp.orchestrator.http.preparation.sampling import sampling_params
from mlx_dp.proto.fields import MAX_CACHE_SALT_CHARS
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.proto.wire.codec import decode_down, encode

SHARED = sorted(
    {field.name for field in fields(SamplingParams)} & CompletionRequest.model_fields.keys()
    - {"logit_bias", "logprobs"}
)  # fmt: skip


def extremes(name: str) -> list[float]:
    """The least and the largest value that HTTP accepts for a field."""
    whole = isinstance(getattr(SamplingParams(), name), int)
    least, most = -math.inf, math.inf
    for bound in bounds(name):
        match bound:
            case annotated_types.Ge(ge):
                least = ge
            case annotated_types.Gt(gt):
                least = gt + 1 if whole else math.nextafter(gt, math.inf)
            case annotated_types.Le(le):
                most = le
            case annotated_types.Lt(lt):
                most = lt - 1 if whole else math.nextafter(lt, -math.inf)
    return [least, most]


def bounds(name: str) -> list[object]:
    return list(_metadata(get_type_hints(CompletionRequest, include_extras=True)[name]))


def _metadata(hint: object) -> Iterator[object]:
    """All metadata of an annotation, and of its nested types."""
    for part in getattr(hint, "__metadata__", ()):
        yield from getattr(part, "metadata", [part])
    for inner in get_args(hint):
        yield from _metadata(inner)


def test_the_fields_that_matter_are_compared():
    assert {"temperature", "top_p", "top_k", "min_p", "seed"} <= set(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_a_worker_accepts_what_http_accepts(name):
    for value in extremes(name):
        assert math.isfinite(value)
        fields = CompletionRequest(prompt="hi", **{name: value})
        request = TextCompletion.accept(fields).generation
        seed = choice_seed(request.sampling.seed, 0)
        made = sampling_params(request, SamplingParams(), seed=seed)
        assert msgspec.convert(msgspec.to_builtins(made), SamplingParams) == made


def test_a_worker_accepts_the_longest_salt_that_http_accepts():
    longest = CompletionRequest(prompt="hi", cache_salt="s" * MAX_CACHE_SALT_CHARS).cache_salt
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="hi", cache_salt="s" * (MAX_CACHE_SALT_CHARS + 1))
    sent = Submit(request_id=1, epoch=1, prompt_ids=(1,), max_tokens=1, cache_salt=longest)
    assert decode_down(encode(sent)) == sent
