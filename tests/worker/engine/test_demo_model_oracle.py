"""The real model in a real worker, against mlx-lm's own single-request generation."""

import random
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from mlx_lm.utils import load_model

from mlx_dp.proto.capacity.ownership import Limits, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Abort, Down, EngineKind, Start, Submit
from mlx_dp.proto.messages.events import FinishReason
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.startup import run_worker
from tests.support.models.oracle import Ties, assert_greedy
from tests.support.worker.scripted_channel import ScriptedChannel

pytestmark = [pytest.mark.mlx, pytest.mark.model]

Lengths = tuple[tuple[int, int], ...]
"""Of prompts and of their answers."""
SIXTEEN: Lengths = (
    *((1, 1), (2, 40), (3, 7), (9, 30), (17, 12), (33, 24), (64, 5), (65, 16)),
    *((100, 40), (130, 8), (255, 20), (256, 10), (257, 30), (400, 6), (700, 12), (1500, 8)),
)
FIVE: Lengths = ((1, 8), (9, 3), (64, 5), (130, 6), (300, 4))
ABORTED = 100


def _start(model: Path, chunk: int) -> Start:
    topology = resolve_topology(dp_size=1, tp_size=None, enable_dp_attention=False)
    return Start(
        engine=EngineKind.MLX,
        model_path=str(model),
        share=divide(topology, Limits(max_running_requests=18)).slices[0],
        memory_nbytes=4 * 2**30,
        context_length=None,
        chunked_prefill_size=chunk,
        prefix_cache=True,
        heartbeat_interval_s=60.0,
    )


def _script(
    lengths: Lengths, *, gap: int, seed: int
) -> tuple[list[Submit], list[tuple[int, Down]]]:
    """Requests that join within ``gap`` loop runs of another, and two that are aborted."""
    rng = random.Random(seed)
    greedy = SamplingParams(temperature=0.0)
    submits = [
        Submit(
            request_id=i,
            epoch=1,
            prompt_ids=tuple(rng.randrange(17, 49_152) for _ in range(length)),
            max_tokens=answer,
            params=greedy,
        )
        for i, (length, answer) in enumerate(lengths)
    ]
    rng.shuffle(submits)
    script: list[tuple[int, Down]] = []
    turn = 0
    for submit in submits:
        script.append((turn, submit))
        turn += rng.randrange(gap)
    for i in range(2):
        victim = Submit(
            request_id=ABORTED + i,
            epoch=1,
            prompt_ids=tuple(rng.randrange(17, 49_152) for _ in range(50)),
            max_tokens=100,
            params=greedy,
        )
        at = rng.randrange(max(turn, 6))
        script += [(at, victim), (at + 6, Abort(request_id=ABORTED + i, epoch=1))]
    return submits, script


@pytest.mark.parametrize(
    ("lengths", "gap", "chunk"),
    [
        pytest.param(FIVE, 4, 256, id="five"),
        pytest.param(SIXTEEN, 12, 512, id="sixteen", marks=pytest.mark.slow),
    ],
)
def test_requests_that_join_and_leave_answer_as_they_would_alone(
    lengths: Lengths, gap: int, chunk: int, demo_model_dir: Path
) -> None:
    submits, script = _script(lengths, gap=gap, seed=7)
    # Room for all, and for the two that are aborted.
    channel = ScriptedChannel(_start(demo_model_dir, chunk), script)
    assert run_worker(channel) is ExitCode.OK
    assert channel.most_at_once >= 4, "the requests hardly met"

    model, _ = load_model(demo_model_dir)
    ties = Ties()
    for submit in submits:
        answer = channel.received[submit.request_id]
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH
        assert answer.finished.num_tokens == len(answer.ids) == submit.max_tokens
        assert_greedy(
            model,
            submit.prompt_ids,
            answer.ids,
            max_tokens=submit.max_tokens,
            ties=ties,
            chunk=chunk,
        )
    print(ties.report())
    assert len(ties.found) <= 2, ties.report()
    for i in range(2):
        aborted = channel.received[ABORTED + i].finished
        assert aborted is not None
        assert aborted.reason is FinishReason.ABORT
