"""Compare mlx-dp with mlx_lm.server: same machine, same model, same clients, interleaved runs."""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from scripts.benchmarks.results.report import column, machine, median, milliseconds
from scripts.benchmarks.serving.scenarios import (
    RUNNING_STREAMS,
    Measures,
    client_leaves,
    long_prompt,
    throughput,
)
from scripts.benchmarks.serving.server import Server, ServerSpec, our_spec, peer_spec
from scripts.benchmarks.serving.tables import (
    Runs,
    leave_table,
    long_prompt_table,
    same_answers,
    throughput_table,
)
from scripts.benchmarks.serving.workload import LONG_PROMPT_TOKENS, Workload

EPILOG = """\
All servers stay up; only one has traffic at a time, and their order rotates from round to round.
A cell is the median over the rounds; a ratio is the median of the ratios within each round.

examples:
  scripts/bench serve --model DIR                 the full comparison (about an hour on 2 cores)
  scripts/bench serve --model DIR --quick         one round, to see that all of it works
  scripts/bench serve --model DIR --levels 16 --dp-sizes 2 --peer-threads 2
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench serve",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="an mlx-lm model directory; float32 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved runs (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round of few requests")
    parser.add_argument(
        "--levels",
        type=int,
        nargs="+",
        default=[1, 4, 8, 16],
        metavar="CLIENTS",
        help="concurrent streaming clients (default 1 4 8 16)",
    )
    parser.add_argument(
        "--requests-per-client", type=int, default=3, help="requests per client and run (default 3)"
    )
    parser.add_argument(
        "--dp-sizes",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="values of --dp-size to compare (default 1 2)",
    )
    parser.add_argument(
        "--peer-threads",
        type=int,
        help="BLAS threads of mlx_lm.server; default: the better one of 1 and 2",
    )
    parser.add_argument(
        "--serve-args",
        default="",
        help='further flags for mlx-dp serve, as one word: "--chunked-prefill-size 256"',
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default 1)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench_serve.json"), help="write every run to this file"
    )
    return parser.parse_args(arguments)


@contextlib.asynccontextmanager
async def running(
    specs: Sequence[ServerSpec], workload: Workload, logs: Path
) -> AsyncIterator[list[Server]]:
    """All servers, started, ready, and warmed up with a request of each kind."""
    servers: list[Server] = []
    with contextlib.ExitStack() as stack:
        for index, spec in enumerate(specs):
            servers.append(Server(spec, logs / f"server-{index}.log"))
            stack.callback(servers[-1].stop)
            await servers[-1].wait_ready()
            await throughput(servers[-1], workload.mixed("warm-up", 4), 4)
        try:
            yield servers
        finally:
            for server in servers:
                if server.ended:
                    say(f"{server.spec.name} ended in between:\n{server.last_words()}")


async def best_peer(model: Path, workload: Workload, level: int, logs: Path) -> ServerSpec:
    """mlx_lm.server at the thread count that serves most tokens at the highest level."""
    speeds: dict[int, float] = {}
    for threads in (1, 2):
        spec = peer_spec(model, threads)
        async with running([spec], workload, logs) as (server,):
            runs = [
                await throughput(server, workload.mixed(f"threads-{attempt}", level), level)
                for attempt in range(2)
            ]
        speeds[threads] = median(column(runs, "tokens_per_s"))
        say(f"{spec.name}: {speeds[threads]:.1f} tokens/s at {level} clients")
    return peer_spec(model, max(speeds, key=lambda threads: speeds[threads]))


async def one_round(
    number: int, servers: Sequence[Server], workload: Workload, options: argparse.Namespace
) -> dict[str, dict[str, Measures]]:
    """Every scenario on every server, by scenario and server name."""
    order = [*servers[number % len(servers) :], *servers[: number % len(servers)]]
    found: dict[str, dict[str, Measures]] = {}
    for level in options.levels:
        requests = workload.mixed(f"{number}/{level}", level * options.requests_per_client)
        for server in order:
            measures = await throughput(server, requests, level)
            found.setdefault(f"clients {level}", {})[server.spec.name] = measures
            speed = f"{measures['tokens_per_s']:.1f} tokens/s"
            say(f"round {number + 1}, {level} clients, {server.spec.name}: {speed}")
    streams = workload.fixed(f"{number}/running", RUNNING_STREAMS, 48, 1000)
    arriving = workload.fixed(f"{number}/arriving", 1, LONG_PROMPT_TOKENS, 4)[0]
    for server in order:
        measures = await long_prompt(server, streams, arriving)
        found.setdefault("long prompt", {})[server.spec.name] = measures
        gap = milliseconds(measures["gap_max_s"])
        say(f"round {number + 1}, long prompt, {server.spec.name}: longest gap {gap}")
        if server.spec.has_loads:
            found.setdefault("client leaves", {})[server.spec.name] = await client_leaves(
                server, workload.fixed(f"{number}/leaving", 4, 48, 1000)
            )
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace) -> None:
    if options.quick:
        options.rounds, options.requests_per_client = 1, 1
    workload = Workload(options.model, options.seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        logs = Path(folder)
        if options.peer_threads is None:
            peer = await best_peer(options.model, workload, max(options.levels), logs)
        else:
            peer = peer_spec(options.model, options.peer_threads)
        model = ["--model", str(options.model), "--served-model-name", "bench"]
        specs = [
            peer,
            *(
                our_spec(
                    f"mlx-dp --dp-size {size}",
                    [*model, "--dp-size", str(size), *options.serve_args.split()],
                )
                for size in options.dp_sizes
            ),
        ]
        scenarios: dict[str, Runs] = {}
        async with running(specs, workload, logs) as servers:
            for number in range(options.rounds):
                found = await one_round(number, servers, workload, options)
                for scenario, by_server in found.items():
                    for name, measures in by_server.items():
                        scenarios.setdefault(scenario, {}).setdefault(name, []).append(measures)
    options.json.write_text(json.dumps({"machine": machine(), "scenarios": scenarios}, indent=1))
    for scenario, runs in scenarios.items():
        if scenario.startswith("clients"):
            print(throughput_table(scenario, runs, peer.name))
    print(long_prompt_table(scenarios["long prompt"], peer.name))
    print(leave_table(scenarios["client leaves"]))
    print(same_answers(scenarios, peer.name))


def main(arguments: list[str]) -> int:
    asyncio.run(run(parse(arguments)))
    return 0
