"""Measure what depends on a Mac: buffers, batches, launches, writes of KV, first steps.

Runs the tests that compute, then each part with a small random model, and writes a report without
names of people or machines. It also runs on Linux, where it shows less.
"""

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

from scripts.benchmarks.results.report import machine
from scripts.mac_check.engine import buffers, first_steps, launches
from scripts.mac_check.models import batch_forms, slab_widths
from scripts.mac_check.report import ROOT, Part, as_json, as_markdown, impersonal
from scripts.mac_check.sizes import FULL, QUICK, Sizes
from scripts.mac_check.tests import run_tests

Measure = Callable[[Path, Sizes], Part]

PARTS: Mapping[str, Measure] = {
    "tests": run_tests,
    "buffers": buffers,
    "batches": batch_forms,
    "launches": launches,
    "slabs": slab_widths,
    "first-steps": first_steps,
}
EPILOG = """\
Leave the machine idle meanwhile: the check measures times. Writes report.md and report.json; please
attach both to an issue. Exits with 1 when a part failed; the other parts run anyway.

parts:
  tests        the tests that run MLX kernels
  buffers      buffers that remain after many requests, against the device's limit
  batches      rows of a batch against single rows, and the rounding of this device
  launches     steps whose launch waits, and the slowdown by a prompt's chunks
  slabs        decode steps by slab width, and writes to KV
  first-steps  first steps after the warm-up and after idle time

examples:
  scripts/mac-check                           all parts
  scripts/mac-check --only launches slabs     two of them
  scripts/mac-check --all                     every test that computes, the slow ones too
  scripts/mac-check --quick --skip tests      tiny sizes, to see that all of it works
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mac-check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help="parts to run (default: all)"
    )
    parser.add_argument(
        "--skip", nargs="+", choices=PARTS, metavar="PART", default=[], help="parts to leave out"
    )
    parser.add_argument("--all", action="store_true", help="run every test that is marked mlx")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes, and no idle time")
    parser.add_argument("--idle-s", type=float, help="idle seconds before a step (default 70)")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "mac-check",
        help="folder of the report (default build/mac-check)",
    )
    return parser.parse_args(arguments)


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = (QUICK if options.quick else FULL).with_output(options.output)
    return sizes.asked(all_tests=options.all, idle_s=options.idle_s)


def run_part(name: str, sizes: Sizes, options: argparse.Namespace) -> Part:
    """Run one part; its failure is reported, and the other parts run anyway."""
    if name in options.skip or name not in (options.only or PARTS):
        return Part(name=name, skipped="by --only or --skip")
    print(f"mac-check: {name}", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mac-check-") as folder:
            return PARTS[name](Path(folder), sizes)
    except Exception as error:
        traceback.print_exc()
        return Part(name=name, failed=impersonal(f"{type(error).__name__}: {error}"))


def described() -> dict[str, object]:
    """The machine, MLX's description of its device, and the settings that change its arithmetic."""
    return {
        **machine(),
        **{f"device {name}": value for name, value in sorted(mx.device_info().items())},
        "MLX_ENABLE_TF32": os.environ.get("MLX_ENABLE_TF32", "not set"),
    }


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(options)
    parts = [run_part(name, sizes, options) for name in PARTS]
    found = described()
    text = as_markdown(found, parts)
    (options.output / "report.md").write_text(text)
    (options.output / "report.json").write_text(as_json(found, parts))
    print(text)
    print(f"mac-check: the report is in {options.output}", file=sys.stderr)
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
