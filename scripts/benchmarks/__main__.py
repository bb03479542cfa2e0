"""Run one benchmark by its name; each explains itself with --help."""

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module with ``main(arguments)``. It is imported when it is chosen: some need MLX."""

    module: str
    summary: str


BENCHMARKS: Final = {
    "serve": Benchmark("serving.comparison", "mlx-dp against mlx_lm.server, over HTTP"),
    "control": Benchmark("control", "what the control plane costs, with fake engines"),
    "engine": Benchmark("engine.comparison", "our engine against mlx-lm's BatchGenerator"),
    "batch": Benchmark("engine.batch", "slabs by length, and prefill chunks in decode steps"),
    "dp-attention": Benchmark("dp_attention.comparison", "the replica modes and one process"),
    "templates": Benchmark("templates", "what the bounds on chat templates cost"),
}

EPILOG: Final = "\n".join(
    [
        "benchmarks:",
        *(f"  {name:<14}{each.summary}" for name, each in BENCHMARKS.items()),
        "",
        "examples:",
        "  scripts/bench engine --quick",
        "  scripts/bench serve --help",
    ]
)


def parse(arguments: list[str]) -> tuple[Benchmark, list[str]]:
    """The benchmark that is named first, and the arguments after it."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        usage="scripts/bench [-h] NAME [arguments of the benchmark]",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help="see below")
    # Not by parse_known_args, which would take a --help that is meant for the benchmark.
    name = parser.parse_args(arguments[:1]).name
    return BENCHMARKS[name], arguments[1:]


def main(arguments: list[str]) -> int:
    benchmark, rest = parse(arguments)
    module = importlib.import_module(f"scripts.benchmarks.{benchmark.module}")
    status: int = module.main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
