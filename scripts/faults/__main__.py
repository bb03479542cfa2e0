"""Inject random faults into a real service, again and again, and check that no client notices.

Each row of the fault matrix starts `mlx-dp serve`, lets clients stream from it, and harms it at
random tokens. Every response is compared with its expectation, character by character.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Final

from scripts.benchmarks.results.report import machine
from scripts.faults.rows import ROWS, row_number
from scripts.faults.simulated import SIMULATED, simulate
from scripts.faults.trials.stage import FINDINGS, Row, Settings, Stage, stop_on_sigterm
from scripts.faults.verdicts.verdict import RowResult, matrix

ENDED_BY_SIGNAL: Final = 130
RUNS_A_TRIAL: Final = 10
"""Runs per trial of a simulated row; a run takes about 20 ms."""
FAKE_ONLY: Final = frozenset({"F15", "F16", "F19", "F26"})
"""Rows that need the fake engine's rates, or its groups, which start at once."""

EPILOG: Final = """\
rows:
{rows}

examples:
  scripts/chaos --quick --jobs 2                     a look at every row
  scripts/chaos --rows F2 F5 --trials 200            two rows at full length
  scripts/chaos --mlx path/to/model --trials 20      with MLX, against undisturbed greedy runs
  scripts/chaos --rows F2 --trials 200 --seed 7      other choices; the machine's timing differs

Times are shortened: a heartbeat every 0.1 s, hung after 1 s, restarts without long delays; not
those of F28. F21, F25 and F29 run in the simulation (tests/faults), 10 runs for each trial.
"""


def _known_rows() -> dict[str, str]:
    titles = {name: row.title for name, row in ROWS.items()}
    titles |= {name: f"{title}, simulated" for name, title in SIMULATED.items()}
    return {name: titles[name] for name in sorted(titles, key=row_number)}


def parse(arguments: list[str]) -> argparse.Namespace:
    known = _known_rows()
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description=__doc__,
        epilog=EPILOG.format(
            rows="\n".join(f"  {name:<5}{title}" for name, title in known.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=known,
        default=None,
        metavar="F",
        help="rows to run (default: all)",
    )
    parser.add_argument(
        "--trials", type=_positive, default=200, help="trials of each row (default 200)"
    )
    parser.add_argument(
        "--quick", dest="trials", action="store_const", const=3, help="3 trials of each row"
    )
    parser.add_argument(
        "--mlx",
        type=Path,
        metavar="MODEL",
        help=f"use this model directory, no fake engine; not for {' '.join(sorted(FAKE_ONLY))}",
    )
    parser.add_argument(
        "--workers", type=_positive, default=3, help="workers of a service (default 3)"
    )
    parser.add_argument(
        "--streams", type=_positive, default=6, help="concurrent clients (default 6)"
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=1,
        help="concurrent rows, each with its own service; most rows mainly wait (default 1)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of every choice (default 1)")
    parser.add_argument(
        "--slack",
        type=float,
        default=1.0,
        help="factor for every time bound, for a machine with other work (default 1)",
    )
    parser.add_argument(
        "--findings",
        type=Path,
        default=FINDINGS,
        help="folder of violations: seed and log in one file each (default build/chaos)",
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small: use 1 or more")
    return number


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows to run, in the order of the matrix."""
    names = ROWS.keys() if options.rows is None else options.rows
    return [
        row
        for name, row in ROWS.items()
        if name in names and row.possible and not (options.mlx and name in FAKE_ONLY)
    ]


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(
        trials=options.trials,
        seed=options.seed,
        model=options.mlx,
        workers=options.workers,
        streams=options.streams,
        slack=options.slack,
        findings=options.findings,
    )


async def run(options: argparse.Namespace) -> list[RowResult]:
    settings = settings_of(options)
    stop_on_sigterm()
    for name, row in ROWS.items():
        if not row.possible and (options.rows is None or name in options.rows):
            print(f"{name} {row.title}: not possible on this system", file=sys.stderr, flush=True)
    room = asyncio.Semaphore(options.jobs)
    # Rows that start a service for each trial take longest, so they start first.
    rows = sorted(chosen(options), key=lambda row: not row.fresh)
    return await asyncio.gather(*(_run_row(row, settings, room) for row in rows))


async def _run_row(row: Row, settings: Settings, room: asyncio.Semaphore) -> RowResult:
    async with room:
        print(f"{row.name} {row.title} ...", file=sys.stderr, flush=True)
        result = await Stage(row, settings).run()
    _report(result)
    return result


def _run_simulated(name: str, options: argparse.Namespace) -> RowResult:
    """The runs of a simulated row count as its trials."""
    began_s = time.monotonic()
    runs = RUNS_A_TRIAL * options.trials
    result = RowResult(name, f"{SIMULATED[name]}, simulated", trials=runs)
    result.violations += simulate(name, options.seed, runs)
    settings_of(options).record(name).write(result.violations, ())
    result.seconds = time.monotonic() - began_s
    _report(result)
    return result


def _report(result: RowResult) -> None:
    print(
        f"{result.row}: {result.trials} trials, {result.requests} requests, "
        f"{len(result.violations)} violations, {result.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _values(result: RowResult) -> dict[str, object]:
    # Not with asdict, which converts counters.
    return {field.name: getattr(result, field.name) for field in fields(result)}


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 when a check failed, 130 after a signal."""
    options = parse(arguments)
    try:
        results = asyncio.run(run(options))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("ended by a signal, without a result", file=sys.stderr)
        return ENDED_BY_SIGNAL
    names = [name for name in SIMULATED if options.rows is None or name in options.rows]
    results += [_run_simulated(name, options) for name in names]
    results.sort(key=lambda result: row_number(result.row))
    violations = [text for result in results for text in result.violations]
    print(matrix(results))
    for text in violations:
        print(f"violation: {text}")
    if options.json is not None:
        found = {"machine": machine(), "rows": [_values(result) for result in results]}
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
