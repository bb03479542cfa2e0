"""Compare our engine with mlx-lm's BatchGenerator: one process, the same weights, rounds in turn.

Ours runs as in a worker: the real start-up, scheduler and loop, only without a socket.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.generate import BatchGenerator

from mlx_dp.proto.capacity.ownership import Limits
from scripts.benchmarks.engine.decode import churn, mixed, steady
from scripts.benchmarks.engine.models import named_model, write_hybrid
from scripts.benchmarks.engine.prompts import join, prefill, second_turn
from scripts.benchmarks.engine.running import memory, pace
from scripts.benchmarks.engine.side import Emitted, Pair
from scripts.benchmarks.engine.sizes import QUICK, Sizes
from scripts.benchmarks.engine.worker import LocalWorker, OurBatch, start_message
from scripts.benchmarks.results.cases import Section
from scripts.benchmarks.results.report import machine

SECTIONS: Mapping[str, Callable[[Pair, Sizes], Section]] = {
    "steady": steady,
    "mixed": mixed,
    "churn": churn,
    "prefill": prefill,
    "second-turn": second_turn,
    "join": join,
    "pace": pace,
    "memory": memory,
}
MODELS = ("dense", "hybrid")
EPILOG = """\
A cell is the median over the rounds; a ratio is the median of the ratios within each round. Dense
is the model that --model names, or the demo model; hybrid is a random one, made at each run. On a
Linux CPU, scripts/bench preloads OpenBLAS, as workers do.

examples:
  scripts/bench engine --json engine.json        the full comparison
  scripts/bench engine --only steady mixed --models dense --rounds 3
  scripts/bench engine --quick                   tiny sizes, to see that all of it works
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench engine",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="as for mlx-dp serve (default: the demo model)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: both)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help="sections to run (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (default 1)")
    parser.add_argument(
        "--chunk", type=int, default=512, help="our --chunked-prefill-size (default 512)"
    )
    parser.add_argument(
        "--memory-gb", type=float, help="our worker's memory (default: half of the free memory)"
    )
    parser.add_argument("--json", type=Path, help="write every round to this file")
    return parser.parse_args(arguments)


class PeerBatch:
    """mlx-lm's ``BatchGenerator`` as in ``mlx_lm.server``: 32 requests, 2,048-token chunks."""

    def __init__(self, model: Any) -> None:
        """Shares our ``model``.

        A second copy of the weights, at other addresses, was measured to be up to 7 %
        faster, on either side.
        """
        self._model = model
        self._generator: Any = BatchGenerator(self._model)
        self._running: set[int] = set()

    @property
    def name(self) -> str:
        return "mlx-lm"

    def submit(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        (request,) = self._generator.insert([list(prompt_ids)], [max_tokens])
        self._running.add(request)
        return int(request)

    def cancel(self, requests: Collection[int]) -> None:
        self._generator.remove(list(requests))
        self._running.difference_update(requests)

    def step(self) -> list[Emitted]:
        _, responses = self._generator.next()
        emitted = [
            Emitted(response.uid, response.token, response.finish_reason is not None)
            for response in responses
        ]
        self._running.difference_update(token.request for token in emitted if token.ended)
        return emitted

    def settle(self) -> None:
        mx.synchronize(self._generator.stream)

    def clear(self) -> None:
        self.cancel(tuple(self._running))
        self.settle()
        # A new one, since an empty one still holds the arrays of its last step.
        self._generator.close()
        self._generator = BatchGenerator(self._model)
        gc.collect()
        mx.clear_cache()


def make_pair(directory: Path, options: argparse.Namespace) -> Pair:
    nbytes = psutil.virtual_memory().available // 2
    if options.memory_gb is not None:
        nbytes = int(options.memory_gb * 1e9)
    start = start_message(
        directory,
        Limits(max_running_requests=64),
        chunk=options.chunk,
        memory_nbytes=nbytes,
        prefix_cache=True,
    )
    worker = LocalWorker(start)
    return Pair(
        ours=OurBatch(worker),
        peer=PeerBatch(worker.model),
        vocab_size=worker.engine.facts.shape.vocab_size,
        rounds=options.rounds,
        seed=options.seed,
    )


def run(
    name: str, directory: Path, options: argparse.Namespace, save: Callable[[str, Section], None]
) -> None:
    """Run the chosen sections on one model, and print each table as soon as it is complete."""
    print(f"\n## {name}: {directory.name}\n", flush=True)
    pair = make_pair(directory, options)
    for section in options.only:
        begun = time.monotonic()
        result = SECTIONS[section](pair, QUICK if options.quick else Sizes())
        print(result.markdown(), flush=True)
        print(f"{name} {section}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        save(section, result)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.quick:
        options.rounds = 1
    models: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in options.models:
            if name == "dense":
                directory = named_model(options.model)
            else:
                directory = write_hybrid(Path(folder) / "granite-hybrid-random")
            found = models.setdefault(name, {})

            def save(section: str, result: Section, found: dict[str, Any] = found) -> None:
                found[section] = result.as_json()
                if options.json is not None:
                    options.json.write_text(
                        json.dumps({"machine": machine(), "models": models}, indent=1)
                    )

            run(name, directory, options, save)
    return 0
