"""Run one benchmark by its name; each has its own --help."""

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module with ``main(arguments)``, imported only when chosen: some modules need MLX."""

    module: str
    summary: str


BENCHMARKS: Final = {
    "serve": Benchmark("serving.comparison", "mlx-dp against mlx_lm.server, over HTTP"),
    "control": Benchmark("control", "the cost of the control plane, with fake engines"),
    "engine": Benchmark("engine.comparison", "our engine against mlx-lm's BatchGenerator"),
    "batch": Benchmark(
        "engine.batch", "slabs by length, and mixed chunks (prefill in decode steps)"
    ),
    "dp-attention": Benchmark("dp_attention.comparison", "DP attention, replicas and one process"),
    "templates": Benchmark("templates", "the cost of the sandbox for chat templates"),
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
    """The name of the benchmark, and the arguments after it."""
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
