"""Minimum length of real models' output: as in mlx-lm, and the same across owners."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Down, Submit
from mlx_dp.proto.messages.events import FinishReason
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.startup import run_worker
from tests.support.models.oracle import greedy_alone
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.worker.chosen_forms import ChosenForms
from tests.support.worker.scripted_channel import ScriptedChannel
from tests.support.worker.worker_starts import mlx_start, no_warm_up

pytestmark = pytest.mark.mlx

PROMPT = tuple(range(5, 40))
MAX_TOKENS = 24
FORMS = ChosenForms()
LEAST = (0, 1, 4, 9, 17, MAX_TOKENS)


def own_answer(model: Any, stops: Sequence[int], least: int) -> tuple[int, ...]:
    """The greedy answer of mlx-lm with a logits processor that bans the stops at first."""
    drawn = 0

    def ban(_: mx.array, logits: mx.array) -> mx.array:
        nonlocal drawn
        drawn += 1
        if drawn <= least:
            logits[:, mx.array(stops)] = -mx.inf
        return logits

    ids: list[int] = []
    for token, _ in generate_step(
        mx.array(PROMPT), model, max_tokens=MAX_TOKENS, logits_processors=[ban]
    ):
        ids.append(int(token))
        if ids[-1] in stops:
            break
    return tuple(ids)


def submit(request_id: int, stops: Sequence[int], params: SamplingParams, **more: Any) -> Submit:
    return Submit(
        request_id=request_id,
        epoch=1,
        prompt_ids=PROMPT,
        max_tokens=MAX_TOKENS,
        stop_token_ids=tuple(stops),
        params=params,
        **more,
    )


def answers(directory: Path, submits: Sequence[Submit]) -> dict[int, tuple[int, ...]]:
    """The whole output of one worker to these requests, which meet in its batch."""
    script: list[tuple[int, Down]] = [(2 * at, each) for at, each in enumerate(submits)]
    channel = ScriptedChannel(mlx_start(directory, requests=len(submits)), script)
    with FORMS.remembered(directory.name), no_warm_up():
        assert run_worker(channel) is ExitCode.OK
    for each in submits:
        end = channel.received[each.request_id].finished
        assert end is not None
        whole = channel.received[each.request_id].ids
        stopped = whole[-1] in each.stop_token_ids
        assert end.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert end.num_tokens == len(whole)
    return {each.request_id: tuple(channel.received[each.request_id].ids) for each in submits}


# One batched, one recurrent, and one unbatched.
@pytest.mark.parametrize("name", ["llama", "mamba", "llama_dynamic_rope"])
def test_greedy_answers_are_those_of_mlx_lm(name: str, tmp_path: Path) -> None:
    directory = ARCHITECTURES[name].write(tmp_path / name)
    model, _ = load_model(directory)
    free = greedy_alone(model, PROMPT, MAX_TOKENS).ids
    stops = (free[0], free[2], 10**6)
    greedy = SamplingParams(temperature=0.0)
    expected = [own_answer(model, stops[:2], least) for least in LEAST]
    assert len(expected[0]) == 1
    submits = [
        submit(at, stops, replace(greedy, min_tokens=least)) for at, least in enumerate(LEAST)
    ]
    found = answers(directory, submits)
    assert [found[at] for at in range(len(LEAST))] == expected
    assert all(len(ids) >= least for ids, least in zip(expected, LEAST, strict=True))


def test_an_answer_goes_on_at_any_other_owner_as_it_would_have(tmp_path: Path) -> None:
    directory = ARCHITECTURES["llama"].write(tmp_path / "llama")
    model, _ = load_model(directory)
    free = greedy_alone(model, PROMPT, MAX_TOKENS).ids
    stops = tuple(free[:3])
    for params in (
        SamplingParams(temperature=0.0, min_tokens=9),
        SamplingParams(temperature=1.2, seed=7, min_tokens=9),
    ):
        [whole] = answers(directory, [submit(0, stops, params)]).values()
        assert len(whole) > 9
        assert not set(stops) & set(whole[:9])
        cuts = [cut for cut in (1, 4, 8, 9, 10) if cut < len(whole)]
        replays = [submit(cut, stops, params, output_ids=whole[:cut]) for cut in cuts]
        assert answers(directory, replays) == dict.fromkeys(cuts, whole)
