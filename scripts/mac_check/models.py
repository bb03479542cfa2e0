"""Measurements of batches: their differences from single rows, their writes."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batch.batch_caches import BatchCaches
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.row_content import read_caches
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.kv_writes import COPIED, copied_share
from mlx_dp.worker.loading.loaded_model import LoadedModel, load
from mlx_dp.worker.loading.rounding import MARGIN, difference, tolerance
from scripts.benchmarks.engine.models import write_hybrid
from scripts.benchmarks.results.report import median
from scripts.mac_check.report import Line, Part, Verdict, judged
from scripts.mac_check.sizes import Sizes

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
ROWS = 4
PROMPT = 33
COPIES = 0.2
WARM_STEPS = 3


def loaded_of(folder: Path, sizes: Sizes, dtype: str) -> LoadedModel:
    directory = write_hybrid(folder / dtype, {**sizes.config, "torch_dtype": dtype})
    path = str(directory / "model.safetensors")
    # mlx-lm computes in the type that the weights have.
    loaded = mx.load(path)
    assert isinstance(loaded, dict), f"{path} holds one array"
    weights = {name: w.astype(DTYPES[dtype]) for name, w in loaded.items()}
    mx.eval(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})
    return load(directory)


def batch_forms(folder: Path, sizes: Sizes) -> Part:
    """The batch form that the worker would choose, and the noise of this device's matmuls."""
    lines: list[Line] = []
    for dtype in DTYPES:
        loaded = loaded_of(folder, sizes, dtype)
        form = choose_form(loaded)
        lines.append(
            Line(
                name=f"{dtype}: how requests run together",
                value=str(form),
                good="in several slabs; one row at a time is a fault",
                verdict=Verdict.BAD if form.single else Verdict.GOOD,
            )
        )
        alone, together = decoded(loaded, 1), decoded(loaded, ROWS)
        lines.append(
            judged(
                f"{dtype}: one row against {ROWS} equal rows, of the largest logit",
                difference(alone, together),
                most=tolerance(alone).most / MARGIN,
                why="beyond it the check of batches cannot allow for so much rounding",
            )
        )
    return Part(name="batches", lines=tuple(lines))


def decoded(loaded: LoadedModel, rows: int) -> list[mx.array]:
    """Logits of two decode steps of the first of equal rows, in mlx-lm's own caches."""
    caches: list[Any] = make_prompt_cache(loaded.model)
    prompt = [(17 + 7 * i) % loaded.shape.vocab_size for i in range(PROMPT)]
    loaded.model(mx.array([prompt] * rows, dtype=mx.int32), cache=caches)
    tokens = mx.array([[5]] * rows, dtype=mx.int32)
    return [loaded.model(tokens, cache=caches)[0, -1] for _ in range(2)]


def slab_widths(folder: Path, sizes: Sizes) -> Part:
    """Decode the same rows in slabs of several widths, with KV written in place and to tails.

    Only the time of copying a slab depends on its width.
    """
    loaded = loaded_of(folder, sizes, "float16")
    if loaded.batch is None:
        return Part(name="slabs", skipped="this model has no batch")
    first, last = sizes.widths[0], sizes.widths[-1]
    copied = copy_s((last - first) * ROWS * loaded.shape.kv_bytes_per_token, 2 * sizes.layers)
    chosen = choose_form(loaded)
    lines = [
        Line(
            name="the form that the worker would choose",
            value=chosen.batching.value,
            good="several_slabs where writes are in place, else several_slabs_with_tails",
            verdict=Verdict.GOOD if chosen.split else Verdict.BAD,
        )
    ]
    for form in (BatchForm(split=True), BatchForm(split=True, tails=True)):
        times = {width: decode_s(loaded, form, width, sizes.steps) for width in sizes.widths}
        lines += [
            unjudged(
                f"{form}: decode step, {ROWS} rows of {PROMPT} tokens, slab {width} wide",
                f"{taken * 1e3:.2f} ms",
            )
            for width, taken in times.items()
        ]
        added = (times[last] - times[first]) / copied
        share = copied_share(loaded, form)
        # The cost of the form that is not chosen is reported, not judged.
        judge = judged if form.tails == chosen.tails else compared
        lines += [
            judge(
                f"{form}: extra time with the widest slab, in copies of it ({copied * 1e3:.2f} ms)",
                added,
                most=COPIES,
                why="about 0 where steps copy nothing, 1 where each step copies the slab",
            ),
            judge(
                f"{form}: extra memory of steps with a wider slab, in the slab's bytes",
                share,
                most=COPIED,
                why="0 where steps copy nothing, 1 where they copy all; above it tails are chosen",
            ),
        ]
    return Part(name="slabs", lines=tuple(lines))


def unjudged(name: str, value: str) -> Line:
    return Line(name=name, value=value, good="the same at all widths")


def compared(name: str, value: float, *, most: float, why: str) -> Line:
    """A line about a form that is not in use, which is not judged."""
    return Line(
        name=name, value=f"{value:.4g}", good=f"not in use; good is at most {most:g}: {why}"
    )


def copy_s(nbytes: int, pieces: int) -> float:
    """Time of writes to arrays with a second reference, each of which copies the whole array."""
    arrays = [mx.zeros(nbytes // pieces // 2, dtype=mx.float16) for _ in range(pieces)]
    one, start = mx.ones(1, dtype=mx.float16), mx.array([0])
    mx.eval(arrays)
    taken = []
    for _ in range(2 * WARM_STEPS):
        begun = time.perf_counter()
        mx.eval([mx.slice_update(array, one, start, axes=[0]) for array in arrays])
        taken.append(time.perf_counter() - begun)
    return median(taken[WARM_STEPS:])


def decode_s(loaded: LoadedModel, form: BatchForm, width: int, steps: int) -> float:
    """The median step, each launched before the previous one is read, as in the engine."""
    assert loaded.batch is not None, "there are no slabs"
    batch = BatchCaches(loaded.layout, form, loaded.batch.state_sizes)
    for row in range(ROWS):
        caches: list[Any] = make_prompt_cache(loaded.model)
        prompt = [(row + 7 * i) % loaded.shape.vocab_size for i in range(PROMPT)]
        loaded.model(mx.array([prompt], dtype=mx.int32), cache=caches)
        content = read_caches(loaded.layout, caches, PROMPT)
        assert content is not None, "the prompt is in"
        batch.join(row, content, room=width)
    ids = mx.array([[5]] * ROWS, dtype=mx.int32)
    before: mx.array | None = None
    taken: list[float] = []
    for _ in range(steps + WARM_STEPS):
        begun = time.perf_counter()
        batch.begin_step()
        logits = loaded.model(ids, cache=batch.caches)
        batch.end_step()
        mx.async_eval(logits)
        if before is not None:
            mx.eval(before)
        before = logits
        taken.append(time.perf_counter() - begun)
    mx.synchronize()
    return median(taken[WARM_STEPS:])
