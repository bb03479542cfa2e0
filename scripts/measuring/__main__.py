"""Measure the reliability figures, each against its bound.

The services are real, with fake engines, so that the control plane is measured.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from scripts.benchmarks.results.report import machine, milliseconds, quantile, table
from scripts.faults.rows.death import streaming_kill
from scripts.faults.rows.fleet import rolling_restart
from scripts.faults.trials.stage import Settings, Stage, stop_on_sigterm
from scripts.measuring.crowd import measure_crowd
from scripts.measuring.garbage import measure_garbage
from scripts.measuring.soak import measure_soak
from scripts.measuring.value import Measured, row_of

UNROUTABLE_S: Final = 0.1
NEXT_TOKEN_S: Final = 1.0

EPILOG: Final = """\
measures:
  kill      SIGKILL of workers under load: time to unroutable, time to the next token elsewhere
  rolling   rolling restarts under load: failed requests, time for each worker
  garbage   garbage on the workers' socket and over HTTP: the controller's memory
  crowd     idle connections and concurrent streams: memory, failures, response times
  soak      load and kills for a long time: growth of memory and files

examples:
  scripts/measure --trials 20                    all but the soak, quickly
  scripts/measure --only kill --trials 200
  scripts/measure --only soak --minutes 30
  scripts/measure --only crowd --idle 10000 --streams 2000
"""


async def measure_kill(options: argparse.Namespace) -> list[Measured]:
    """SIGKILL of a worker that streams: the times until its loss is seen and its streams resume."""
    result = await Stage(row_of("kill", streaming_kill), _settings(options)).run()
    found = [
        Measured.bounded(f"{name} p99", quantile(values_s, 0.99), bound_s, milliseconds)
        for name, values_s, bound_s in (
            ("SIGKILL to unroutable", result.detection_s, UNROUTABLE_S),
            ("SIGKILL to next token elsewhere", result.recovery_s, NEXT_TOKEN_S),
        )
    ]
    found += [
        Measured.bounded(f"{name} of {result.requests} requests", count, 0, str)
        for name, count in (
            ("lost tokens", result.lost),
            ("repeated tokens", result.repeated),
            ("failed", result.failed),
            ("violations", len(result.violations)),
        )
    ]
    print(*result.violations, sep="\n", file=sys.stderr)
    return found


async def measure_rolling(options: argparse.Namespace) -> list[Measured]:
    """A rolling restart of every worker, under load."""
    result = await Stage(row_of("rolling", rolling_restart), _settings(options)).run()
    print(*result.violations, sep="\n", file=sys.stderr)
    text = f"failed of {result.requests} requests in {result.trials} rolling restarts"
    return [
        Measured.bounded(text, result.failed, 0, str),
        Measured.bounded("violations", len(result.violations), 0, str),
        Measured("one worker replaced p99", milliseconds(quantile(result.recovery_s, 0.99))),
    ]


MEASURES: Final[dict[str, Callable[[argparse.Namespace], Awaitable[list[Measured]]]]] = {
    "kill": measure_kill,
    "rolling": measure_rolling,
    "garbage": measure_garbage,
    "crowd": measure_crowd,
    "soak": measure_soak,
}


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        trials=options.trials,
        seed=options.seed,
        model=None,
        workers=options.workers,
        streams=options.clients,
        slack=1.0,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/measure",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASURES,
        default=[name for name in MEASURES if name != "soak"],
        metavar="MEASURE",
        help="measures to run (default: all but soak)",
    )
    parser.add_argument(
        "--trials", type=int, default=200, help="kills and rolling restarts (default 200)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of every choice (default 1)")
    parser.add_argument("--workers", type=int, default=3, help="workers of a service (default 3)")
    parser.add_argument("--clients", type=int, default=6, help="concurrent streams (default 6)")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="length of the soak (default 30)"
    )
    parser.add_argument(
        "--idle", type=int, default=10_000, help="idle connections of the crowd (default 10000)"
    )
    parser.add_argument(
        "--streams", type=int, default=2_000, help="streams of the crowd (default 2000)"
    )
    parser.add_argument(
        "--megabytes", type=int, default=100, help="amount of garbage (default 100)"
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace) -> list[Measured]:
    stop_on_sigterm()
    found: list[Measured] = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found += await MEASURES[name](options)
    return found


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 when a bound was exceeded."""
    options = parse(arguments)
    found = asyncio.run(run(options))
    print(table(("measure", "value", "bound", ""), [each.cells() for each in found]))
    if options.json is not None:
        values = {each.name: [each.value, each.bound, each.kept] for each in found}
        options.json.write_text(json.dumps({"machine": machine(), "values": values}, indent=1))
    return 0 if all(each.kept for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
