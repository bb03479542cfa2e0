"""Output of a busy engine: quantised models, rows that outgrow their space, sampling, preemption.

The output of every architecture in a busy worker is for ``tests/conformance``.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_dp.proto.capacity import request_limits
from mlx_dp.proto.capacity.ownership import resolve_capacity
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from tests.support.batches.held_inputs import inputs_held
from tests.support.models.oracle import Ties, assert_greedy
from tests.support.models.tiny_models import ARCHITECTURES, DENSE, TINY_MODELS, TinyModel
from tests.support.text.tiny_tokenizer import VOCAB_SIZE
from tests.support.worker.engine_simulation import GREEDY, Job, Simulation, random_jobs
from tests.support.worker.worker_starts import mlx_start

pytestmark = pytest.mark.mlx

SLOTS = 5


def opened(directory: Path) -> MlxEngine:
    """An engine with the capacity that the worker's start resolves."""
    start = mlx_start(directory, requests=SLOTS)
    engine = MlxEngine.load(start)
    engine.open(
        resolve_capacity(
            start.share,
            pool_tokens=engine.facts.pool_tokens,
            hybrid=engine.facts.shape.hybrid,
            prefix_cache=start.prefix_cache,
        )
    )
    engine.warm_up()
    return engine


def simulate(
    directory: Path, chunk: int, seed: int = 3, *, batching: Batching | None = None
) -> None:
    """Run a busy engine and compare all of its output with the oracle's."""
    rng = random.Random(seed)
    jobs = random_jobs(rng, VOCAB_SIZE)
    engine = opened(directory)
    assert batching in (None, engine.facts.batching)
    simulation = Simulation(engine, rng, slots=SLOTS, chunk=chunk)
    simulation.run(jobs)
    assert simulation.evicted > 0
    assert simulation.most_at_once > 2
    hold_to_oracle(directory, jobs, chunk)


def hold_to_oracle(directory: Path, jobs: list[Job], chunk: int) -> None:
    model, _ = load_model(directory)
    ties = Ties()
    for job in jobs:
        assert_greedy(
            model, job.prompt_ids, job.answer, max_tokens=job.max_tokens, ties=ties, chunk=chunk
        )
    assert len(ties.found) <= 1, ties.report()


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("llama", 1),
        ("gemma3_text", 7),
        ("deepseek_v2", 7),
        ("mamba", 7),
        ("qwen3_next", 64),
        ("llama4", 512),
    ],
)
def test_requests_that_are_evicted_and_return_answer_as_alone(name, chunk, tmp_path):
    # One of each kind of cache. llama4 is served one by one, and its chunked layers see less where
    # a chunk of the prompt ends: 512 holds it whole.
    simulate(ARCHITECTURES[name].write(tmp_path), chunk, seed=chunk)


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt_oss", "qwen3_next"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "falcon_h1")],
)
def test_answers_are_the_same_where_the_device_holds_what_a_step_has_read(name, tmp_path):
    with inputs_held():
        simulate(ARCHITECTURES[name].write(tmp_path), 64, batching=Batching.SLABS_WITH_TAILS)


def write_quantised(tiny: TinyModel, directory: Path, bits: int) -> Path:
    tiny.write(directory)
    model = tiny.build()
    settings = {"group_size": 32, "bits": bits}
    nn.quantize(model, **settings)
    mx.save_safetensors(
        str(directory / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (directory / "config.json").write_text(json.dumps(tiny.config | {"quantization": settings}))
    return directory


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("qwen3", 8), ("qwen3_moe", 4)])
def test_quantised_models_answer_as_alone(name, bits, tmp_path):
    simulate(write_quantised(TINY_MODELS[name], tmp_path, bits), 7)


@pytest.mark.parametrize(
    "name",
    ["stablelm", "gear"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma3_text")],
)
def test_rows_that_outgrow_their_room_answer_as_alone(name, tmp_path, monkeypatch):
    # Longer than the output that a row is made for: the first row of 256 tokens becomes one of 512,
    # and the rows of the batch change places.
    monkeypatch.setattr(request_limits, "NEXT_ANSWER_TOKENS", 8)
    directory = ARCHITECTURES[name].write(tmp_path)
    jobs = [Job(tuple(range(4, 244)), 30), Job((5, 9, 70), 40), Job((8,), 20)]
    Simulation(opened(directory), random.Random(1), slots=SLOTS, chunk=64).run(jobs)
    hold_to_oracle(directory, jobs, 64)


def test_sampled_requests_draw_the_same_however_they_meet(tmp_path):
    directory = DENSE["llama"].write(tmp_path)
    wild = SamplingParams(temperature=1.5, top_p=0.95, top_k=50, min_p=0.01)
    penalised = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3)
    answers = []
    for seed in (1, 2):
        rng = random.Random(5)
        jobs = random_jobs(rng, VOCAB_SIZE)
        for i, params in enumerate((GREEDY, wild, penalised, wild, penalised, GREEDY)):
            jobs[i].params = replace(params, seed=i, logit_bias=((2, -100.0),))
        # Another order, other slots, chunks and evictions: the same requests.
        order = random.Random(seed).sample(jobs, len(jobs))
        Simulation(opened(directory), random.Random(seed), slots=SLOTS, chunk=9).run(order)
        answers.append([job.answer for job in jobs])
    assert answers[0] == answers[1]
