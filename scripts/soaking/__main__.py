"""Run thousands of random requests through a worker with little memory, and check everything.

Prompts share beginnings, repeat, and continue earlier chats, under several salts. Requests are
cancelled at random times, and preempted, since the budget is small. All invariants are checked
meanwhile, some greedy responses are compared with mlx-lm's own, and memory must not grow.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.utils import load_model

from mlx_dp.proto.capacity.ownership import Limits
from scripts.benchmarks.engine.models import HYBRID, named_model, write_hybrid
from scripts.benchmarks.engine.worker import LocalWorker, start_message
from scripts.benchmarks.results.report import table
from scripts.soaking.control import Job, SoakControl
from scripts.soaking.memory import BudgetWatch, MemorySample, growth
from scripts.soaking.requests import RequestMaker
from tests.support.models.oracle import Ties, assert_greedy

MODELS = ("dense", "hybrid")
SOAKED_HYBRID = {**HYBRID, "mamba_d_state": 16, "num_key_value_heads": 6}
"""Small states and much KV: a budget with room for all states would never be short."""
EPILOG = """\
Exits with 1 when memory grew or a response differs, with a traceback when an invariant broke.

examples:
  OPENBLAS_NUM_THREADS=2 scripts/soak
  scripts/soak --models hybrid --requests 300 --seed 7
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="as for mlx-dp serve (default: the demo model)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: both)"
    )
    parser.add_argument(
        "--requests", type=int, default=5000, help="requests per model (default 5000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of every choice (default 1)")
    parser.add_argument("--slots", type=int, default=12, help="concurrent requests (default 12)")
    parser.add_argument(
        "--tokens", type=int, default=3000, help="budget, as --max-total-tokens (default 3000)"
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=2.5,
        help="memory of the worker; MLX may keep a tenth of it for reuse (default 2.5)",
    )
    parser.add_argument(
        "--chunk", type=int, default=256, help="as --chunked-prefill-size (default 256)"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="disable the prefix cache")
    parser.add_argument(
        "--check-every", type=int, default=20, help="loop runs between checks (default 20)"
    )
    parser.add_argument(
        "--verify", type=int, default=100, help="greedy responses to compare (default 100)"
    )
    return parser.parse_args(arguments)


def soak(directory: Path, options: argparse.Namespace) -> list[str]:
    """Run all requests on one model; return the failures, as sentences."""
    start = start_message(
        directory,
        Limits(max_running_requests=options.slots, max_total_tokens=options.tokens),
        chunk=options.chunk,
        memory_nbytes=int(options.memory_gb * 1e9),
        prefix_cache=not options.no_prefix_cache,
    )
    worker = LocalWorker(start)
    control = SoakControl(worker, RequestMaker(options.seed, worker.engine.facts.shape.vocab_size))
    watch = BudgetWatch(worker.capacity.cache_nbytes)
    samples: list[MemorySample] = []
    full: list[MemorySample] = []
    kept: list[Job] = []
    for target in checkpoints(options.requests):
        kept += run_to(target, worker, control, watch, options)
        samples.append(MemorySample.take(control.counters.ended, worker.engine.held_nbytes))
        if watch.was_full:
            full.append(samples[-1])
        say(f"{control.counters}")
        say("  ".join(samples[-1].row()))
    headers = ["requests", "RSS", "MLX active", "MLX cache", "held by the owner"]
    print(table(headers, [sample.row() for sample in samples]) + "\n")
    print(f"{control.counters}\n\n{watch}\n")
    wrong = memory_faults(full) + watch.faults()
    if not control.counters.preempted:
        wrong.append("nothing was preempted: the budget was never short, so lower --tokens")
    wrong += emptied(worker, control)
    return wrong + compare(directory, kept, options)


def checkpoints(requests: int) -> list[int]:
    """Counts of requests after which a sample is taken: 100, 500, 1,000, then every 500."""
    return [*(at for at in (100, *range(500, requests, 500)) if at < requests), requests]


def run_to(
    target: int,
    worker: LocalWorker,
    control: SoakControl,
    watch: BudgetWatch,
    options: argparse.Namespace,
) -> list[Job]:
    """Run until this many requests have ended and none runs; return responses to compare."""
    kept: list[Job] = []
    every = max(1, options.requests // (2 * max(1, options.verify)))
    turn = 0
    while control.counters.ended < target or not control.idle:
        turn += 1
        control.run_once(more=control.counters.ended < target)
        if turn % options.check_every == 0:
            worker.check()
        watch.look(worker.engine.held_nbytes, running=control.running)
        kept += [
            job for job in control.finished if job.request.greedy and not job.request_id % every
        ]
    worker.check()
    return kept


def memory_faults(full: Sequence[MemorySample]) -> list[str]:
    """Compare the end with the first sample after the budget was full once."""
    if len(full) < 2:
        return ["the budget was not full before the last sample: run more requests"]
    return growth(full[0], full[-1])


def emptied(worker: LocalWorker, control: SoakControl) -> list[str]:
    """After a flush, an idle owner must hold nothing."""
    flushed = control.flush()
    worker.check()
    print(f"{flushed}\n")
    used = worker.engine.memory().used_tokens
    held = worker.engine.held_nbytes
    return [] if not used and not held else [f"{used} tokens and {held} bytes held after a flush"]


def compare(directory: Path, jobs: Sequence[Job], options: argparse.Namespace) -> list[str]:
    """Compare greedy responses with mlx-lm's own; ties of the two best tokens are counted."""
    model, _ = load_model(directory)
    ties, wrong = Ties(), []
    for job in jobs[: options.verify]:
        try:
            assert_greedy(
                model,
                job.request.prompt_ids,
                job.answer,
                max_tokens=job.request.max_tokens,
                ties=ties,
                stop_ids=job.request.stop_token_ids,
                chunk=options.chunk,
            )
        except AssertionError as error:
            wrong.append(f"request {job.request_id}, granted {job.epoch} times: {error}")
    replayed = sum(job.epoch > 1 for job in jobs[: options.verify])
    print(f"{min(len(jobs), options.verify)} answers compared, {replayed} of them replayed")
    print(ties.report() + "\n")
    return wrong


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for name in options.models:
            if name == "dense":
                directory = named_model(options.model)
            else:
                directory = write_hybrid(Path(folder) / "granite-hybrid-random", SOAKED_HYBRID)
            print(f"\n## {name}: {directory.name}\n", flush=True)
            begun = time.monotonic()
            wrong += [f"{name}: {text}" for text in soak(directory, options)]
            say(f"{name}: {time.monotonic() - begun:.0f} s")
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
