"""Measure two design decisions: slabs by length, and mixed chunks (prefill in decode steps).

Each is compared with the plain alternative in the same process, in turns, on a real model.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, SegmentPart
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.engine.decode_batch import DecodeBatch
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk
from mlx_dp.worker.grammar.compiler import GrammarCompiler
from mlx_dp.worker.grammar.masks import GrammarMasks
from mlx_dp.worker.loading.loaded_model import LoadedModel, load

GREEDY = SamplingParams(temperature=0.0)
SPREAD = [24, 32, 48, 64, 64, 96, 96, 128, 128, 160, 192, 256, 320, 400, 800, 1500]
MIXES = {
    "16 rows of 64": [64] * 16,
    "16 rows, 24 to 1,500": SPREAD,
    "15 rows of 64 and one of 4,000": [64] * 15 + [4000],
}
CHUNKS = (16, 32, 64)
ROWS = (1, 4, 8)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench batch", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an mlx-lm model directory")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--steps", type=int, default=8, help="steps timed per round (default 8)")
    return parser.parse_args(arguments)


def make_batch(
    directory: Path, loaded: LoadedModel, lengths: Sequence[int], *, split: bool
) -> DecodeBatch:
    """Return a batch with one row per length; its content is random, since only time counts."""
    vocab = loaded.shape.vocab_size
    segments = Segments()
    batch = DecodeBatch(
        DecodeCaches(loaded, BatchForm(split=split)),
        segments,
        GrammarMasks(GrammarCompiler(directory, vocab)),
        vocab_size=vocab,
    )
    for key, length in enumerate(lengths):
        ids = tuple(random.randrange(vocab) for _ in range(length))
        prefill = Prefill(loaded, ids)
        segments.put_segment(key, random_kv(loaded, length - 1))
        prefill.reuse(
            CachedPrefix(pieces=(SegmentPart(key, length - 1),), num_tokens=length - 1), segments
        )
        segments.drop((key,), ())
        prefill.take_ids(1)
        request = EngineRequest(prompt_ids=ids, output_ids=(), max_tokens=10_000, params=GREEDY)
        batch.join(key, request, prefill, room=length + 64)
    decode(batch)()
    return batch


def random_kv(loaded: LoadedModel, num_tokens: int) -> list[LayerKV]:
    assert loaded.batch is not None, "main() has checked the model"
    return [
        LayerKV(*(random_tokens(array, num_tokens) for array in kv)) for kv in loaded.batch.empty.kv
    ]


def random_tokens(like: mx.array, num_tokens: int) -> mx.array:
    """Return random values [1, KV heads, tokens, head dim] in the shape and type of a cache."""
    _, heads, _, dim = like.shape
    return mx.random.normal((1, heads, num_tokens, dim), dtype=like.dtype)


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    step()
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    mx.synchronize()
    return (time.perf_counter() - started_at) / steps


def decode(batch: DecodeBatch) -> Callable[[], None]:
    return lambda: launch(batch, ())


def launch(batch: DecodeBatch, chunks: Sequence[PromptChunk]) -> None:
    batch.launch_forward(chunks)
    mx.eval(batch.launch_sampling().sampled.tokens)


def decode_and_prefill(
    loaded: LoadedModel, batch: DecodeBatch, num_tokens: int, *, mixed: bool
) -> Callable[[], None]:
    """Return a step that decodes the batch and prefills one chunk of a long prompt."""
    prefill = Prefill(loaded, [7] * 4096)

    def step() -> None:
        if not mixed:
            prefill.run(num_tokens)
            launch(batch, ())
            return
        chunk = PromptChunk.cut_from(prefill, num_tokens)
        assert chunk is not None, "the prompt is longer than all steps together"
        launch(batch, (chunk,))

    return step


def table(
    title: str, names: tuple[str, str], rows: list[tuple[str, list[float], list[float]]]
) -> None:
    print(f"\n### {title}\n\n| | {names[0]} | {names[1]} | ratio |\n| --- | --- | --- | --- |")
    for name, plain, ours in rows:
        ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
        cells = (f"{statistics.median(values) * 1000:.0f} ms" for values in (plain, ours))
        print(f"| {name} | {' | '.join(cells)} | {ratio:.2f}x |")


def compare_slabs(options: argparse.Namespace, loaded: LoadedModel) -> None:
    rows = []
    for name, lengths in MIXES.items():
        plain, slabs = (
            make_batch(options.model, loaded, lengths, split=split) for split in (False, True)
        )
        times = [
            [seconds_per_step(decode(batch), options.steps) for batch in (plain, slabs)]
            for _ in range(options.rounds)
        ]
        rows.append((name, [t[0] for t in times], [t[1] for t in times]))
    table("Time of a decode step", ("one rectangle", "slabs by length"), rows)


def compare_mixed_chunks(options: argparse.Namespace, loaded: LoadedModel) -> None:
    rows = []
    for count in ROWS:
        for chunk in CHUNKS:
            times = []
            for _ in range(options.rounds):
                batch = make_batch(options.model, loaded, [64] * count, split=True)
                steps = [
                    decode_and_prefill(loaded, batch, chunk, mixed=mixed) for mixed in (False, True)
                ]
                times.append([seconds_per_step(step, options.steps) for step in steps])
            name = f"{count} rows decode, {chunk} tokens prefill"
            rows.append((name, [t[0] for t in times], [t[1] for t in times]))
    table("Time of a step that also prefills", ("two passes", "mixed"), rows)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    random.seed(1)
    loaded = load(options.model)
    if loaded.batch is None or loaded.layout.stateful:
        print(
            f"--model {options.model} has sliding windows, recurrent states or caches of its own: "
            "use a model whose layers all keep every token",
            file=sys.stderr,
        )
        return 2
    compare_slabs(options, loaded)
    compare_mixed_chunks(options, loaded)
    return 0
