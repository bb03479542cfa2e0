"""Measure the cost of the control plane: fake engines behind the real HTTP server, no model.

Two services are measured. The engines of the first run at full speed, which shows the highest rate
of tokens that HTTP, controller and protocol carry, and the controller's CPU time for them. The
engines of the second run at a fixed rate, so that a request's time is known beforehand, which shows
the latency that the control plane adds.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.results.report import machine, milliseconds, quantile, table
from scripts.benchmarks.serving.client import Request, run_clients
from scripts.benchmarks.serving.server import Server, our_spec

PROMPT = "Hi"
"""Short, since workers ration prompt tokens while they decode, which is not measured here."""

EPILOG = """\
Controller, workers and clients share the cores: the clients' own CPU time is printed as well, and
tokens/s is a lower bound where cores are few.

examples:
  scripts/bench control                           1, 8 and 64 streams over one worker
  scripts/bench control --dp-size 2 --streams 64 256
  scripts/bench control --quick                   few short requests, to see that it works
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench control",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dp-size", type=int, default=1, help="fake workers (default 1)")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 8, 64],
        metavar="N",
        help="concurrent streams (default 1 8 64)",
    )
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of a response (default 256)"
    )
    parser.add_argument(
        "--requests-per-stream",
        type=int,
        default=4,
        help="successive requests of a stream (default 4)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=50.0,
        help="steps per second of the engines whose latency is measured (default 50)",
    )
    parser.add_argument("--quick", action="store_true", help="short responses, one per stream")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench_control.json"),
        help="write all measurements to this file",
    )
    return parser.parse_args(arguments)


async def measure(server: Server, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the streams, and return their times and the CPU time of controller and clients."""
    request = Request(
        prompt=PROMPT,
        prompt_tokens=len(PROMPT),
        max_tokens=options.tokens,
        ignore_eos=True,
    )
    controller_s, client_s = server.controller_cpu_s(), time.process_time()
    begun = time.monotonic()
    seen = await run_clients(
        server.client, [request] * (streams * options.requests_per_stream), streams
    )
    wall_s = time.monotonic() - begun
    controller_s = server.controller_cpu_s() - controller_s
    client_s = time.process_time() - client_s
    tokens = sum(stream.completion_tokens for stream in seen)
    gaps = [gap for stream in seen for gap in stream.gaps_s]
    return {
        "streams": streams,
        "requests": len(seen),
        "completion_tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "controller_cpu_s_per_1000_tokens": 1000 * controller_s / tokens,
        "client_cpu_s_per_1000_tokens": 1000 * client_s / tokens,
        "ttft_s": sorted(stream.ttft_s for stream in seen),
        "request_s": sorted(stream.ended_s - stream.sent_s for stream in seen),
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
    }


async def measure_all(options: argparse.Namespace, rate: float, log: Path) -> list[dict[str, Any]]:
    """Measure a service whose engines have this decode rate (0: full speed)."""
    arguments = ["--engine", "fake", "--served-model-name", "bench"]
    arguments += ["--dp-size", str(options.dp_size), "--fake-decode-rate", str(rate)]
    name = f"rate {rate:g}" if rate else "full speed"
    server = Server(our_spec(name, arguments), log)
    try:
        await server.wait_ready()
        await run_clients(server.client, [Request(prompt=PROMPT, prompt_tokens=1, max_tokens=8)], 1)
        found = []
        for streams in options.streams:
            found.append(await measure(server, streams, options))
            speed = found[-1]["tokens_per_s"]
            print(f"{name}, {streams} streams: {speed:.0f} tokens/s", file=sys.stderr)
        return found
    finally:
        server.stop()


def speed_table(runs: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(run["streams"]),
            f"{run['tokens_per_s']:.0f}",
            f"{run['controller_cpu_s_per_1000_tokens']:.3f} s",
            f"{run['client_cpu_s_per_1000_tokens']:.3f} s",
            milliseconds(quantile(run["ttft_s"], 0.5)),
            milliseconds(quantile(run["ttft_s"], 0.99)),
        ]
        for run in runs
    ]
    headers = ["streams", "tokens/s", "controller CPU per 1,000 tokens", "clients' CPU"]
    return f"### Full speed\n\n{table([*headers, 'TTFT p50', 'p99'], rows)}\n"


def latency_table(runs: Sequence[dict[str, Any]], rate: float, tokens: int) -> str:
    """The time added to the steps; for the first token, all of it, as prompts cost no time here."""
    engine_s = (tokens - 1) / rate
    rows = [
        [
            str(run["streams"]),
            f"{engine_s * 1000:.0f} ms",
            *(f"{(quantile(run['request_s'], q) - engine_s) * 1000:.1f} ms" for q in (0.5, 0.99)),
            f"{quantile(run['ttft_s'], 0.5) * 1000:.1f} ms",
            f"{quantile(run['ttft_s'], 0.99) * 1000:.1f} ms",
            f"{run['gap_p50_s'] * 1000:.1f} ms",
            f"{run['gap_p99_s'] * 1000:.1f} ms",
        ]
        for run in runs
    ]
    headers = ["streams", "engine alone", "added p50", "p99", "of it to the first token p50", "p99"]
    return (
        f"### Engines of {rate:g} steps/s\n\n{table([*headers, 'gap p50', 'p99'], rows)}\n\n"
        f"A request that arrives within a step waits for its end: up to {1000 / rate:.0f} ms.\n"
    )


async def run(options: argparse.Namespace) -> None:
    if options.quick:
        options.tokens, options.requests_per_stream = 16, 1
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fast = await measure_all(options, 0.0, Path(folder) / "fast.log")
        paced = await measure_all(options, options.rate, Path(folder) / "paced.log")
    options.json.write_text(
        json.dumps(
            {
                "machine": machine(),
                "dp_size": options.dp_size,
                "rate": options.rate,
                "tokens": options.tokens,
                "full_speed": fast,
                "paced": paced,
            },
            indent=1,
        )
    )
    print(speed_table(fast))
    print(latency_table(paced, options.rate, options.tokens))


def main(arguments: list[str]) -> int:
    asyncio.run(run(parse(arguments)))
    return 0
