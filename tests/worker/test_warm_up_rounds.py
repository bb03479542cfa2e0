"""The rounds of the warm-up: every sampling parameter, and nothing beyond the limits."""

from collections.abc import Iterator
from dataclasses import MISSING, fields

import pytest

from mlx_dp.proto.capacity.model_shape import CacheWindow, ModelShape
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.warm_up_rounds import (
    ALONE,
    LONG_TOKENS,
    MAX_WIDTH,
    SAMPLINGS,
    WarmUpRound,
    WarmUpScope,
    warm_up_rounds,
)


def scope(*, slots: int = 8, most: int = 8_192, windows: tuple[int, ...] = ()) -> WarmUpScope:
    return WarmUpScope(
        shape=ModelShape(
            num_layers=2,
            attention_layers=2,
            auxiliary_layers=0,
            kv_bytes_per_token=64,
            auxiliary_bytes_per_slot=0,
            vocab_size=1_000,
            context_length=8_192,
            weights_nbytes=0,
            windows=tuple(CacheWindow(tokens=tokens, bytes_per_token=64) for tokens in windows),
        ),
        request_slots=slots,
        max_request_tokens=most,
    )


def requests(rounds: Iterator[WarmUpRound]) -> list[Submit]:
    return [
        request for each in rounds for wave in (each.companions, *each.waves) for request in wave
    ]


def round_named(name: str, asked: WarmUpScope) -> WarmUpRound:
    (found,) = [each for each in warm_up_rounds(asked) if each.name == name]
    return found


CHANGING = [field for field in fields(SamplingParams) if field.name not in ("temperature", "seed")]


@pytest.mark.parametrize("field", CHANGING, ids=lambda field: field.name)
def test_every_parameter_is_sampled_with_by_itself_and_with_all_others(field) -> None:
    assert field.default is not MISSING
    using = [p for p in SAMPLINGS if getattr(p, field.name) != field.default]
    assert len(using) >= 2, f"the warm-up leaves out {field.name}"
    assert any(getattr(p, field.name) != field.default for p in ALONE)


def test_no_request_is_beyond_the_limits_however_tight_they_are() -> None:
    for most in (2, 8, 40, 600, 100_000):
        for request in requests(warm_up_rounds(scope(most=most))):
            assert len(request.prompt_ids) + request.max_tokens <= max(most, 4), request
            assert len(request.output_ids) < request.max_tokens


def test_only_the_prompts_that_are_meant_to_share_a_prefix_do() -> None:
    firsts = [request.prompt_ids[:2] for request in requests(warm_up_rounds(scope(slots=32)))]
    shared = {first for first in firsts if firsts.count(first) > 1}
    assert len(shared) == 1


@pytest.mark.parametrize(
    ("slots", "widths"),
    [
        (1, [1]),
        (6, [6, 3, 1]),
        (8, [8, 4, 2, 1]),
        (4_096, [MAX_WIDTH, 16, 8, 4, 2, 1]),
    ],
)
def test_a_batch_halves_until_one_row_is_left(slots: int, widths: list[int]) -> None:
    (rows,) = round_named("batches of all widths", scope(slots=slots)).waves
    steps = range(max(row.max_tokens for row in rows))
    assert [sum(row.max_tokens > step for row in rows) for step in steps] == widths


@pytest.mark.parametrize(
    ("windows", "tokens"),
    [((), LONG_TOKENS), ((512,), LONG_TOKENS), ((2_048,), 2_049), ((100_000,), LONG_TOKENS)],
)
def test_the_long_prompt_is_beyond_the_windows_that_one_can_afford(
    windows: tuple[int, ...], tokens: int
) -> None:
    ((request,),) = round_named("a long prompt", scope(windows=windows)).waves
    assert len(request.prompt_ids) == tokens
