"""Compare DP attention with data-parallel replicas and with one process, on two models.

The models are a dense one, and a random mixture of experts, whose experts are nine tenths of its
weights.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.dp_attention.kill import kill_worker
from scripts.benchmarks.dp_attention.modes import (
    ONE,
    RANKS,
    REPLICAS,
    mode_specs,
    owner_counts,
    weights_nbytes,
    workers_rss_nbytes,
)
from scripts.benchmarks.dp_attention.moe import write_moe
from scripts.benchmarks.dp_attention.split import measure_splits, split_table
from scripts.benchmarks.dp_attention.tables import (
    MOE_WEIGHTS,
    kill_table,
    passes_table,
    speed_table,
    weights_table,
)
from scripts.benchmarks.engine.models import named_model
from scripts.benchmarks.results.cases import Goal
from scripts.benchmarks.results.report import machine, milliseconds
from scripts.benchmarks.serving.client import Request
from scripts.benchmarks.serving.comparison import running, say
from scripts.benchmarks.serving.scenarios import Measures, throughput
from scripts.benchmarks.serving.server import Server
from scripts.benchmarks.serving.tables import same_answers
from scripts.benchmarks.serving.workload import Workload

MODELS: Final = ("dense", "moe")
PARTS: Final = ("serve", "kill", "split")
CASES: Final = ((1, 0), (4, 0), (4, 4), (8, 8))
SPLIT_TURNS: Final = 5
"""Short samples, so that a slow spell of the machine spoils few of them."""
KILL_STREAMS: Final = 4
BEAT_S: Final = 1.2
"""A little more than the time between heartbeats, which carry the counters."""

EPILOG: Final = """\
One process, two replicas and two ranks all stay up; one has traffic at a time, in an order that
rotates. A cell is the median over the rounds; a ratio is the median of those within each round.

examples:
  scripts/bench dp-attention                    all of it, in about 12 minutes on 2 cores
  scripts/bench dp-attention --quick              to see that all of it works
  scripts/bench dp-attention --models moe --parts serve --levels 16 --rounds 5
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench dp-attention",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="the dense model, as for mlx-dp serve (default: demo)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="models (default: both)"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="interleaved runs (default 2)")
    parser.add_argument(
        "--levels",
        type=int,
        nargs="+",
        default=[1, 4, 8, 16],
        metavar="CLIENTS",
        help="concurrent clients (default 1 4 8 16)",
    )
    parser.add_argument("--kills", type=int, default=2, help="kills of each mode (default 2)")
    parser.add_argument(
        "--steps", type=int, default=8, help="decode steps per measured time (default 8)"
    )
    parser.add_argument(
        "--lm-head", action="store_true", help="also two ranks with --enable-dp-lm-head"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small amounts, to see that all of it works"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default 1)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench_dp_attention.json"),
        help="write all measurements to this file",
    )
    return parser.parse_args(arguments)


async def serve_rounds(
    servers: Sequence[Server], workload: Workload, options: argparse.Namespace
) -> dict[str, dict[str, list[Measures]]]:
    """Each level on each server in each round, by level and server."""
    found: dict[str, dict[str, list[Measures]]] = {}
    for number in range(options.rounds):
        turn = number % len(servers)
        order = [*servers[turn:], *servers[:turn]]
        for level in options.levels:
            requests = requests_of(workload, f"{number}/{level}", level)
            for server in order:
                before, cpu_s = await owner_counts(server), server.cpu_s()
                measures = await throughput(server, requests, level)
                cpu_s = server.cpu_s() - cpu_s
                measures["cpu_s_per_token"] = cpu_s / measures["completion_tokens"]
                await asyncio.sleep(BEAT_S)
                after = await owner_counts(server)
                measures["counts"] = {
                    f"{name} {rank}": value - before[name, rank]
                    for (name, rank), value in after.items()
                }
                by_server = found.setdefault(f"{level} client{'s' * (level > 1)}", {})
                by_server.setdefault(server.spec.name, []).append(measures)
                speed = f"{measures['tokens_per_s']:.1f} tokens/s"
                say(f"round {number + 1}, {level} clients, {server.spec.name}: {speed}")
    return found


def requests_of(workload: Workload, name: str, level: int) -> list[Request]:
    """A random model may stop anywhere: ignore_eos keeps responses at their length."""
    requests = workload.mixed(name, max(2, level))
    return [replace(request, ignore_eos=True) for request in requests]


async def kill_rounds(
    servers: Sequence[Server], workload: Workload, kills: int
) -> Mapping[str, list[Measures]]:
    """Kill a worker of each server with two workers, in turns."""
    found: dict[str, list[Measures]] = {}
    for number in range(kills):
        requests = workload.fixed(f"kill/{number}", KILL_STREAMS, 48, 1000)
        requests = [replace(request, ignore_eos=True) for request in requests]
        for server in servers:
            if server.spec.name in (REPLICAS, RANKS):
                measures = await kill_worker(server, requests)
                found.setdefault(server.spec.name, []).append(measures)
                recovered = milliseconds(measures["next_token_s"])
                say(f"kill {number + 1}, {server.spec.name}: next token after {recovered}")
    return found


async def run_model(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model; print each table as soon as it is complete."""
    print(f"\n## {name}: {model.name}\n", flush=True)
    found: dict[str, Any] = {}
    if {"serve", "kill"} & set(options.parts):
        workload = Workload(model, options.seed)
        specs = mode_specs(model, head=options.lm_head)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            async with running(specs, workload, Path(folder)) as servers:
                goal = MOE_WEIGHTS if name == "moe" else None
                found |= await run_servers(servers, workload, options, goal)
    if "split" in options.parts:
        cases = CASES[:2] if options.quick else CASES
        turns = 1 if options.quick else SPLIT_TURNS
        splits = await measure_splits(model, cases, options.steps, turns)
        found["split"] = [asdict(measured) for measured in splits]
        print(f"### A step of decode\n\n{split_table(splits)}\n", flush=True)
    return found


async def run_servers(
    servers: Sequence[Server],
    workload: Workload,
    options: argparse.Namespace,
    goal: Goal | None,
) -> dict[str, Any]:
    weights = {server.spec.name: await weights_nbytes(server) for server in servers}
    resident = {server.spec.name: await workers_rss_nbytes(server) for server in servers}
    found: dict[str, Any] = {"weights": weights, "rss": resident}
    print(weights_table(weights, resident, goal), flush=True)
    if "serve" in options.parts:
        found["serve"] = await serve_rounds(servers, workload, options)
        for level, runs in found["serve"].items():
            print(speed_table(level, runs), flush=True)
        print(passes_table({level: runs[RANKS] for level, runs in found["serve"].items()}))
        print(f"{same_answers(found['serve'], ONE)}\n", flush=True)
    if "kill" in options.parts:
        found["kill"] = await kill_rounds(servers, workload, options.kills)
        print(kill_table(found["kill"]), flush=True)
    return found


async def run(options: argparse.Namespace) -> None:
    if options.quick:
        options.rounds, options.levels, options.kills = 1, [1, 4], 1
    dense = named_model(options.model)
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in options.models:
            began = time.monotonic()
            model = dense
            if name == "moe":
                model = write_moe(Path(folder) / "qwen3-moe-random", tokenizer_of=dense)
            models[name] = await run_model(name, model, options)
            say(f"{name}: {time.monotonic() - began:.0f} s")
            options.json.write_text(json.dumps({"machine": machine(), "models": models}, indent=1))


def main(arguments: list[str]) -> int:
    asyncio.run(run(parse(arguments)))
    return 0
