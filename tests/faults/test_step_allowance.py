"""The real loop under the real judge, in virtual time: slow steps live, stopped ones are lost."""

import random
from functools import partial

import pytest
from worker_bench import Bench, submit

from faults.step_device import LIMITS, HonestEngine, JudgedChannel, StepDevice, options
from mlx_dp.orchestrator.control.liveness import Verdict
from mlx_dp.proto.messages import Submit

SEEDS = range(40)
FEW_TOKENS_S = 2.5
"""Allowed for a prompt so short that its end is not worth a heartbeat."""
CHUNKS = (32, 128, 512, 2048, 4096)


def bench_of(rng: random.Random, chunks: tuple[int, ...] = CHUNKS) -> Bench:
    device, blocks = StepDevice.drawn(rng), rng.random() < 0.5
    return Bench(
        options=options(),
        engine=partial(HonestEngine, device, blocks=blocks),
        slots=4,
        chunk=rng.choice(chunks),
        pool=100_000,
        channel=JudgedChannel,
    )


def request(rng: random.Random, request_id: int, *, tokens: int | None = None) -> Submit:
    prompt = tokens or rng.choice(
        (rng.randint(1, 40), rng.randint(40, 600), rng.randint(600, 9_000))
    )
    return submit(request_id, prompt=prompt, max_tokens=rng.randint(1, 40))


def run_some(bench: Bench, rng: random.Random, *, turns: int, first_id: int) -> None:
    """Requests come and go, alone and together, while the device changes its speed."""
    for turn in range(turns):
        if rng.random() < 0.06:
            bench.engine.device.change()
        if len(bench.scheduler.requests) < 4 and rng.random() < 0.1:
            bench.channel.verbs.append(request(rng, first_id + turn))
        bench.loop.turn()


def warmed(rng: random.Random) -> Bench:
    """At first the pace is not known, and the machine is as fast as it can be."""
    bench = bench_of(rng)
    bench.channel.verbs.append(request(rng, 1, tokens=2_000))
    drain(bench)
    return bench


def drain(bench: Bench) -> None:
    while bench.engine.busy or bench.channel.verbs or len(bench.scheduler.requests):
        bench.loop.turn()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_honest_step_is_taken_for_a_hang(seed: int) -> None:
    rng = random.Random(seed)
    bench = warmed(rng)
    run_some(bench, rng, turns=400, first_id=10)
    assert bench.channel.verdicts.isdisjoint({Verdict.HUNG, Verdict.SILENT})


@pytest.mark.parametrize("seed", SEEDS)
def test_no_long_prompt_makes_a_worker_overdue(seed: int) -> None:
    rng = random.Random(seed)
    bench = warmed(rng)
    device = bench.engine.device
    # What takes long is the prompt, and neither its kernels nor the rows beside it.
    device.decode_s, device.first_use_s = min(device.decode_s, 0.1), 0.0
    bench.channel.verdicts.clear()
    run_some(bench, rng, turns=400, first_id=10)
    assert bench.channel.verdicts <= {Verdict.ALIVE, Verdict.SUSPICIOUS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_stops_after_a_prompt_is_lost_soon(seed: int) -> None:
    rng = random.Random(seed)
    bench = bench_of(rng)
    bench.channel.verbs.append(submit(1, prompt=rng.randint(900, 9_000), max_tokens=50))
    while not len(bench.channel.sent) or bench.channel.sent[-1].tag != "tokens":
        bench.loop.turn()
    # Stopped at its first token, or any later one.
    for _ in range(rng.randint(0, 8)):
        assert bench.channel.lost_after_s <= LIMITS.hang_timeout_s + FEW_TOKENS_S
        bench.loop.turn()
    assert bench.channel.lost_after_s <= LIMITS.hang_timeout_s + FEW_TOKENS_S


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_stops_within_a_prompt_is_lost_by_its_own_pace(seed: int) -> None:
    rng = random.Random(seed)
    bench = bench_of(rng, CHUNKS[:3])
    run_some(bench, rng, turns=100, first_id=10)
    drain(bench)
    bench.channel.verbs.append(request(rng, 1, tokens=9_000))
    for _ in range(rng.randint(6, 16)):
        bench.loop.turn()
    # Two steps may be under way, and what was told may be twice as much.
    steps_s = 4 * bench.engine.device.longest_s
    assert bench.channel.allowance_s <= LIMITS.prefill_margin * steps_s + FEW_TOKENS_S
