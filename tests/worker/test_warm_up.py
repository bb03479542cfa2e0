"""The warm-up runs every step form of serving beforehand, and leaves nothing behind."""

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Abort, Down, Submit
from mlx_dp.proto.messages.events import (
    Heartbeat,
    Preempted,
    Ready,
    Rejected,
    RejectReason,
    Up,
    WorkerPhase,
)
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest, PrefillChunk, StepPlan
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from mlx_dp.worker.startup import run_worker
from mlx_dp.worker.warm_up import warm_up
from tests.support.batches.grammar_answers import regex
from tests.support.batches.step_forms import StepForms
from tests.support.models.tiny_models import ARCHITECTURES, DENSE, DYNAMIC_ROPE
from tests.support.worker.fake_controller import Request
from tests.support.worker.scripted_channel import ScriptedChannel
from tests.support.worker.worker_starts import mlx_start

pytestmark = pytest.mark.mlx

MODELS = {
    "in several slabs": DENSE["llama"],
    "in one slab": DENSE["stablelm"],
    "windows": ARCHITECTURES["gemma3_text"],
    "states": ARCHITECTURES["qwen3_next"],
    "one by one": DYNAMIC_ROPE,
}
SERVED = {
    "a batch of up to 1",
    "a batch of up to 8",
    "a grammar of some rows",
    *(
        f"{asked} of some rows"
        for asked in (
            *("random draws", "top_k", "top_p", "min_p", "repetition", "presence", "frequency"),
            *("logit_bias", "logprobs", "min_tokens"),
        )
    ),
}
SERVED_BY = {
    "in several slabs": SERVED
    | {
        "a mixed chunk",
        "prompts together",
        "rows of several widths",
        "a cached prefix without state",
        "a cached prefix that parts",
    },
    "windows": {"a cached prefix with state", "a batch of up to 8"},
    "states": {"a cached prefix with state", "a row that is not batched"},
}
"""Preconditions of the script below, or the test would show nothing."""
SLOTS = 8
OUTGROWS = 3
"""The request whose answer outgrows its row."""
STOP = 259
"""The tiny models' last token."""


class Channel(ScriptedChannel):
    """Reports the forms that ran in the warm-up, and then records serving anew."""

    def __init__(self, *args, seen: StepForms) -> None:
        super().__init__(*args)
        self._seen = seen
        self.warm: set[str] = set()
        self.warm_operations: set[str] = set()

    def send(self, message: Up) -> None:
        if isinstance(message, Heartbeat) and message.phase is WorkerPhase.WARMING:
            self._seen.clear()
        if isinstance(message, Ready):
            self.warm, self.warm_operations = self._seen.forms, self._seen.operations
            self._seen.clear()
        super().send(message)

    def put_back(self, request: Request, message: Preempted | Rejected) -> None:
        assert isinstance(message, Rejected), message
        assert message.reason in (RejectReason.NO_SLOT, RejectReason.NO_TOKENS), message


def ticking() -> Iterator[float]:
    return (0.0001 * tick for tick in count())


def mixed_script(seed: int) -> list[tuple[int, Down]]:
    """Requests with every sampling parameter, in bursts and alone, some aborted."""
    rng = random.Random(seed)
    script: list[tuple[int, Down]] = []
    turn = 0
    prompts: list[tuple[int, ...]] = []
    for request_id in range(1, 41):
        turn += rng.choice((0, 0, 1, 2, 25))
        script.append((turn, asked_for(rng, request_id, prompts)))
        if rng.random() < 0.15:
            script.append((turn + rng.randint(1, 8), Abort(request_id=request_id, epoch=1)))
    return script


def asked_for(rng: random.Random, request_id: int, prompts: list[tuple[int, ...]]) -> Submit:
    prompt = tuple(rng.randrange(STOP) for _ in range(rng.choice((1, 2, 5, 20, 64, 130, 200))))
    if prompts and rng.random() < 0.3:
        prompt = rng.choice(prompts) + prompt[:20]
    prompts.append(prompt)
    long = 300 if request_id == OUTGROWS else 60
    max_tokens = rng.choice((1, 3, 6, 9, long if request_id % 8 else 12))
    return Submit(
        request_id=request_id,
        epoch=1,
        prompt_ids=prompt,
        output_ids=() if max_tokens < 6 or rng.random() < 0.8 else (5, 6),
        max_tokens=min(max_tokens, 40) if request_id % 3 else max_tokens,
        stop_token_ids=(STOP,),
        params=sampling(rng),
        grammar=some_grammar(rng),
    )


def some_grammar(rng: random.Random) -> Grammar | None:
    return regex("[a-z]{2,9}") if rng.random() < 0.15 else None


def sampling(rng: random.Random) -> SamplingParams:
    """One thing or several."""
    asked = SamplingParams(temperature=rng.choice((0.0, 0.8, 1.2)), seed=rng.randrange(99))
    for change in (
        {"top_k": rng.choice((1, 5, 50))},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": ((3, 2.0), (4, -2.0))},
        {"logprobs": rng.choice((0, 1, 20))},
        {"min_tokens": 3},
    ):
        if rng.random() < 0.25:
            asked = replace(asked, **change)
    return asked


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_served_that_the_warm_up_has_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = StepForms(monkeypatch)
    start = mlx_start(MODELS[name].write(tmp_path), requests=SLOTS)
    channel = Channel(start, mixed_script(1), seen=seen)
    clock = ticking()
    assert run_worker(channel, clock=lambda: next(clock)) is ExitCode.OK
    assert SERVED_BY.get(name, set()) <= seen.forms, "too little was served"
    assert seen.forms - channel.warm == set()
    assert seen.operations - channel.warm_operations == set()


def settled_memory() -> int:
    """Bytes of live arrays, once those that wait for a collection or the device are gone."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


class TestOneEngine:
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[MlxEngine]:
        engine = MlxEngine.load(mlx_start(DENSE["llama"].write(tmp_path), requests=SLOTS))
        engine.open(CAPACITY)
        yield engine
        engine.close()

    def test_the_warm_up_leaves_nothing_behind(self, engine: MlxEngine) -> None:
        randomness = [state.tolist() for state in mx.random.state]
        held = engine.held_nbytes, engine.held_buffers, engine.growth_nbytes()
        blocks = engine.launch_blocks
        # Other tests of this process may hold arrays of their own.
        active_nbytes = settled_memory()
        warmed(engine)
        assert (engine.held_nbytes, engine.held_buffers, engine.growth_nbytes()) == held
        assert engine.launch_blocks is blocks
        assert not engine.busy
        assert engine.memory().used_tokens == 0
        assert [state.tolist() for state in mx.random.state] == randomness
        assert settled_memory() <= active_nbytes + 2**16

    def test_answers_are_those_of_an_engine_that_was_not_warmed_up(
        self, engine: MlxEngine, tmp_path: Path
    ) -> None:
        cold = MlxEngine.load(mlx_start(tmp_path, requests=SLOTS))
        cold.open(CAPACITY)
        warmed(engine)
        assert answers(engine) == answers(cold)
        cold.close()

    def test_a_slow_model_is_ready_in_time_and_its_rows_are_gone(self, engine: MlxEngine) -> None:
        """Each reading of the clock is half a second later than the one before."""
        clock = count(step=0.5)
        warmed(engine, clock)
        assert next(clock) < 2 * engine.facts.warm_up_s + 5.0
        assert not engine.busy
        assert engine.memory().used_tokens == 0


CAPACITY = OwnerCapacity(
    request_slots=SLOTS, auxiliary_slots=0, pool_tokens=100_000, cache_nbytes=2**28
)


def warmed(engine: MlxEngine, clock: Iterator[float] | None = None) -> None:
    ticks = clock or ticking()
    warm_up(engine, CAPACITY, context_length=2_048, chunk_tokens=512, clock=lambda: next(ticks))


def answers(engine: MlxEngine) -> list[tuple[int, int]]:
    """The tokens of a few requests with many parameters, by slot."""
    rng = random.Random(7)
    for slot in range(4):
        ids = tuple(rng.randrange(STOP) for _ in range(9))
        engine.add(
            slot,
            EngineRequest(prompt_ids=ids, output_ids=(), max_tokens=12, params=sampling(rng)),
        )
    drawn = engine.step(
        StepPlan(prefill=tuple(PrefillChunk(slot=slot, num_tokens=9) for slot in range(4)))
    )
    while engine.busy:
        drawn += engine.step(StepPlan())
    return [(token.slot, token.token) for token in drawn]
