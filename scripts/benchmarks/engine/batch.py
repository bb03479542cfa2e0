"""What two decisions about the batch are worth: slabs by length, and chunks that ride in a step.

Both are compared with the plain alternative in the same process, interleaved, on a real model.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.engine.decode_batch import DecodeBatch
from mlx_dp.worker.engine.prefill import Prefill
from mlx_dp.worker.engine.prompt_chunk import PromptChunk
from mlx_dp.worker.loading.loaded_model import LoadedModel, load

GREEDY = SamplingParams(temperature=0.0)
MIXES = {
    "16 rows of 64": [64] * 16,
    "16 rows, 24 to 1,500": [
        24,
        32,
        48,
        64,
        64,
        96,
        96,
        128,
        128,
        160,
        192,
        256,
        320,
        400,
        800,
        1500,
    ],
    "15 rows of 64 and one of 4,000": [64] * 15 + [4000],
}
CHUNKS = (16, 32, 64)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench batch", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an mlx-lm model directory")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--steps", type=int, default=8, help="steps timed per round (default 8)")
    return parser.parse_args(arguments)


def make_batch(loaded: LoadedModel, lengths: Sequence[int], *, split: bool) -> DecodeBatch:
    """Return a batch with one row per length; its content is random, since only time counts."""
    vocab = loaded.shape.vocab_size
    batch = DecodeBatch(loaded.model, loaded.empty, vocab_size=vocab, form=BatchForm(split=split))
    for key, length in enumerate(lengths):
        content = [
            kv._replace(
                keys=mx.random.normal((1, kv.keys.shape[1], length - 1, kv.keys.shape[3])),
                values=mx.random.normal((1, kv.values.shape[1], length - 1, kv.values.shape[3])),
            )
            for kv in loaded.empty
        ]
        request = EngineRequest(
            prompt_ids=tuple(random.randrange(vocab) for _ in range(length)),
            output_ids=(),
            max_tokens=10_000,
            params=GREEDY,
        )
        batch.join(key, request, content, room=length + 64)
    batch.launch().read()
    return batch


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    step()
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    mx.synchronize()
    return (time.perf_counter() - started_at) / steps


def decode(batch: DecodeBatch) -> Callable[[], None]:
    return lambda: mx.eval(batch.launch().sampled.tokens)


def mixed(
    loaded: LoadedModel, batch: DecodeBatch, chunk: int, *, rides: bool
) -> Callable[[], None]:
    """A step that decodes the batch and prefills one chunk of a long prompt."""
    prefill = Prefill(loaded.model, [7] * 4096, room=4096)

    def step() -> None:
        chunk = None
        if rides:
            chunk = PromptChunk.take(prefill, chunk)
        else:
            prefill.run(chunk)
        mx.eval(batch.launch(chunk).sampled.tokens)

    return step


def table(
    title: str, names: tuple[str, str], rows: list[tuple[str, list[float], list[float]]]
) -> None:
    print(f"\n### {title}\n\n| | {names[0]} | {names[1]} | ratio |\n| --- | --- | --- | --- |")
    for name, plain, ours in rows:
        ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
        cells = (f"{statistics.median(values) * 1000:.0f} ms" for values in (plain, ours))
        print(f"| {name} | {' | '.join(cells)} | {ratio:.2f}x |")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    random.seed(1)
    loaded = load(options.model)
    rows = []
    for name, lengths in MIXES.items():
        batches = [make_batch(loaded, lengths, split=split) for split in (False, True)]
        times = [
            [seconds_per_step(decode(batch), options.steps) for batch in batches]
            for _ in range(options.rounds)
        ]
        rows.append((name, [t[0] for t in times], [t[1] for t in times]))
    table("Time of a decode step", ("one rectangle", "slabs by length"), rows)

    rows = []
    for count in (1, 4, 8):
        for chunk in CHUNKS:
            times = []
            for _ in range(options.rounds):
                batch = make_batch(loaded, [64] * count, split=True)
                times.append(
                    [
                        seconds_per_step(mixed(loaded, batch, chunk, rides=rides), options.steps)
                        for rides in (False, True)
                    ]
                )
            name = f"{count} rows decode, {chunk} tokens prefill"
            rows.append((name, [t[0] for t in times], [t[1] for t in times]))
    table("Time of a step that also prefills", ("two passes", "mixed"), rows)
    return 0
