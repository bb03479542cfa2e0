"""The real loop under the real hang check, in virtual time: slow steps live, stopped ones are lost.

Each run raises AssertionError where that does not hold.
"""

import random
from functools import partial
from typing import Final

from mlx_dp.orchestrator.control.workers.liveness import LivenessVerdict
from mlx_dp.proto.messages.commands import Submit
from tests.support.simulation.step_device import (
    LIMITS,
    HonestEngine,
    JudgedChannel,
    StepDevice,
    options,
)
from tests.support.worker.worker_bench import Bench, submit

FEW_TOKENS_S: Final = 2.5
"""Allowed for a prompt so short that its end is not worth a heartbeat."""
CHUNKS: Final = (32, 128, 512, 2048, 4096)


def honest_steps(seed: int) -> None:
    """Requests come and go, and the device gets up to 5 times slower: no worker is lost."""
    rng = random.Random(f"{seed} honest")
    bench = _warmed(rng)
    _run_some(bench, rng, turns=400)
    assert bench.channel.verdicts.isdisjoint({LivenessVerdict.HUNG, LivenessVerdict.SILENT}), (
        "an honest worker"
    )


def long_prompts(seed: int) -> None:
    """Where only prompts take long, no worker is overdue."""
    rng = random.Random(f"{seed} long")
    bench = _warmed(rng)
    device = bench.engine.device
    device.decode_s, device.first_use_s = min(device.decode_s, 0.1), 0.0
    bench.channel.verdicts.clear()
    _run_some(bench, rng, turns=400)
    assert bench.channel.verdicts <= {LivenessVerdict.ALIVE, LivenessVerdict.SUSPICIOUS}, (
        bench.channel.verdicts
    )


def stop_after_prompt(seed: int) -> None:
    """A worker that stops at the first tokens after a long prompt is lost like any other."""
    rng = random.Random(f"{seed} after")
    bench = _bench(rng)
    bench.channel.commands.append(submit(1, prompt=rng.randint(900, 9_000), max_tokens=50))
    while not bench.channel.sent or bench.channel.sent[-1].tag != "tokens":
        bench.loop.run_once()
    for _ in range(rng.randint(0, 8)):
        _lost_within(bench, LIMITS.hang_timeout_s + FEW_TOKENS_S)
        bench.loop.run_once()
    _lost_within(bench, LIMITS.hang_timeout_s + FEW_TOKENS_S)


def stop_within_prompt(seed: int) -> None:
    """A worker that stops in the middle of a prompt is lost by the pace of its own steps."""
    rng = random.Random(f"{seed} within")
    bench = _bench(rng, CHUNKS[:3])
    _run_some(bench, rng, turns=100)
    _drain(bench)
    bench.channel.commands.append(_request(rng, 1, tokens=9_000))
    for _ in range(rng.randint(6, 16)):
        bench.loop.run_once()
    # Two steps may be in flight, and the reported time may be doubled.
    steps_s = 4 * bench.engine.device.longest_s
    allowed_s = LIMITS.prefill_margin * steps_s + FEW_TOKENS_S
    _lost_within(bench, LIMITS.hang_timeout_s + allowed_s)


RUNS: Final = (honest_steps, long_prompts, stop_after_prompt, stop_within_prompt)


def run_seed(seed: int) -> None:
    """All of them, with one seed."""
    for run in RUNS:
        run(seed)


def _bench(rng: random.Random, chunks: tuple[int, ...] = CHUNKS) -> Bench:
    device, blocks = StepDevice.drawn(rng), rng.random() < 0.5
    return Bench(
        options=options(),
        engine=partial(HonestEngine, device, blocks=blocks),
        slots=4,
        chunk=rng.choice(chunks),
        pool=100_000,
        channel=JudgedChannel,
    )


def _warmed(rng: random.Random) -> Bench:
    """At first the pace is not known, and the machine is as fast as it can be."""
    bench = _bench(rng)
    bench.channel.commands.append(_request(rng, 1, tokens=2_000))
    _drain(bench)
    return bench


def _request(rng: random.Random, request_id: int, *, tokens: int | None = None) -> Submit:
    least, most = rng.choice(((1, 40), (40, 600), (600, 9_000)))
    prompt = tokens or rng.randint(least, most)
    return submit(request_id, prompt=prompt, max_tokens=rng.randint(1, 40))


def _run_some(bench: Bench, rng: random.Random, *, turns: int) -> None:
    """Requests come, alone and together, while the device changes its speed."""
    for turn in range(turns):
        if rng.random() < 0.06:
            bench.engine.device.change()
        if len(bench.scheduler.requests) < 4 and rng.random() < 0.1:
            bench.channel.commands.append(_request(rng, 10 + turn))
        bench.loop.run_once()


def _drain(bench: Bench) -> None:
    while bench.engine.busy or bench.channel.commands or len(bench.scheduler.requests):
        bench.loop.run_once()


def _lost_within(bench: Bench, most_s: float) -> None:
    lost_s = bench.channel.lost_after_s
    assert lost_s <= most_s, f"lost {lost_s:.1f} s after its last message, allowed: {most_s:.1f} s"
