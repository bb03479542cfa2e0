"""Checks, when a model is loaded, that its batch gives the same results as single requests."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.kvcache.batch.batch_caches import BatchCaches
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.batched_kv_cache import NotSplittableError
from mlx_dp.kvcache.batch.kv_batch import MIN_WIDTH
from mlx_dp.kvcache.batch.mixed_chunk import MixedChunk
from mlx_dp.kvcache.row_content import read_caches
from mlx_dp.worker.contract.failure import is_model_fault
from mlx_dp.worker.loading.kv_writes import steps_copy
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.loading.padding_check import keeps_padding_out
from mlx_dp.worker.loading.rounding import Trial, compare
from mlx_dp.worker.loading.row_noise import continued, decode_noise, prefilled

logger = logging.getLogger(__name__)

PLAIN: Final = BatchForm(split=False)
FORMS: Final = (BatchForm(split=True), PLAIN, BatchForm(split=False, grouped_mask=True))
"""In the order of preference, the most efficient first."""
ALONE: Final = BatchForm(split=False, single=True, resumes=False)
"""The way mlx-lm runs a single request, so it is always correct."""
LENGTHS: Final = (33, 39, 35, 36)
"""With ``spread``, two rows of unequal length share a slab, the third has its own, and the last
prompt is a mixed chunk. All are so long that recurrent states have their final shapes."""
MIXED: Final = len(LENGTHS) - 1
STEPS: Final = 2
_CHOICES: Final = {"index_topk": 8, "index_topk_blocks": 1, "index_block_size": 8}
"""The attributes of mlx-lm's modules that limit the number of tokens that sparse attention
chooses, with a small value for the check."""


def choose_form(loaded: LoadedModel) -> BatchForm:
    """Return the first form in which this model's batch gives the results of single requests.

    If there is none, requests run one by one, and the form has the reason. Running out of memory
    raises: it proves nothing about the form.
    """
    if loaded.batch is None:
        unwritten = "one of its caches is not written by every pass"
        return replace(ALONE, reason=loaded.layout.unbatchable or unwritten)
    faults: dict[BatchForm, str] = {}
    for form in FORMS:
        fault = _fault(loaded, form)
        if fault is None:
            with narrowed(loaded.model) as chooses:
                fault = _fault(loaded, form) if chooses else None
        if fault is None:
            pads = loaded.layout.hybrid and form.split and keeps_padding_out(loaded)
            form = replace(form, resumes=_resumes(loaded, form), pads=pads)
            return _with_tails(loaded, form) if steps_copy(loaded, form) else form
        logger.info("batch check: %s this model %s", form, fault)
        faults[form] = fault
    # The other forms fail most models for reasons of their own, which say nothing about this one.
    return replace(ALONE, reason=f"this model {faults[PLAIN]}")


def _with_tails(loaded: LoadedModel, form: BatchForm) -> BatchForm:
    """Return the form for a device on which steps copy the slabs that they write to."""
    fault = "attends to one array" if not form.split else None
    if fault is None:
        tails = replace(form, tails=True)
        fault = _fault(loaded, tails)
        if fault is None:
            return tails
    logger.warning(
        "batch check: on this device each step copies all KV, since with tails this model %s", fault
    )
    return form


def _fault(loaded: LoadedModel, form: BatchForm) -> str | None:
    """Return what is wrong with a batch of this model; None: nothing."""
    # An error here is not a fault of batches: the model cannot run at all.
    alone = _alone(loaded, 0)
    try:
        found = compare(
            lambda trial: Trial.of(
                _alone(loaded, trial) if trial else alone, *_runs(loaded, form, trial)
            ),
            lambda trial: decode_noise(loaded, _prompts(loaded, trial)[0], _tokens(loaded, trial)),
        )
    except NotSplittableError as error:
        return f"cannot be served, since {error}"
    except Exception as error:
        if not is_model_fault(error):
            raise
        # Any error of a model file on a batch of unequal rows becomes the reason.
        return (
            f"cannot run a batch of requests of different lengths ({type(error).__name__}: {error})"
        )
    if not found.agrees:
        return (
            f"gives other results in a batch than alone (logits differ by {found.worst:.2g} of the "
            f"largest one, and rounding explains {found.allowed:.2g})"
        )
    return None


def _alone(loaded: LoadedModel, trial: int) -> list[mx.array]:
    """Logits [STEPS, vocab] of each prompt's next tokens, in mlx-lm's own caches."""
    tokens = _tokens(loaded, trial)
    prompts = _prompts(loaded, trial)
    return [continued(loaded, prefilled(loaded, prompt), tokens)[0] for prompt in prompts]


def _resumes(loaded: LoadedModel, form: BatchForm) -> bool:
    """Whether the output is independent of the ends of prefill chunks.

    It is not if masks are wider than caches: a token then sees more within a chunk than across its
    start.
    """
    batch = _batch_of(loaded, form, _prompts(loaded, 0)[:1])
    batch.begin_step()
    loaded.model(mx.array([_tokens(loaded, 0)[:1]], dtype=mx.int32), cache=batch.caches)
    batch.end_step()
    return not batch.kv.asks_wide


def _prompts(loaded: LoadedModel, trial: int) -> list[list[int]]:
    vocab = loaded.shape.vocab_size
    return [
        [(17 + 31 * row + 7 * i + 97 * trial) % vocab for i in range(n)]
        for row, n in enumerate(LENGTHS)
    ]


def _tokens(loaded: LoadedModel, trial: int) -> list[int]:
    """The same arbitrary tokens for all rows: drawn ones could differ between the two runs."""
    return [(5 + 11 * step + 53 * trial) % loaded.shape.vocab_size for step in range(STEPS)]


def _runs(loaded: LoadedModel, form: BatchForm, trial: int) -> Iterator[list[mx.array]]:
    """Yield the logits of each way in which a batch of this form can run."""
    prompts, tokens = _prompts(loaded, trial), _tokens(loaded, trial)
    if form.split:
        # This form also runs in one slab, as below; there the model itself attends with a mask.
        mixed = None if loaded.layout.hybrid else prompts[MIXED]
        yield _batched(loaded, form, prompts[:MIXED], tokens, mixed=mixed, spread=True)
    yield _batched(loaded, form, prompts[:MIXED], tokens)


def _batched(
    loaded: LoadedModel,
    form: BatchForm,
    prompts: list[list[int]],
    tokens: list[int],
    *,
    mixed: list[int] | None = None,
    spread: bool = False,
) -> list[mx.array]:
    """As ``_alone``, in one batch: in one slab, or in two and with a mixed chunk."""
    batch = _batch_of(loaded, form, prompts, spread=spread)
    rows: list[list[mx.array]] = [[] for _ in prompts]
    mixed_caches: list[Any] = make_prompt_cache(loaded.model)
    for step, token in enumerate(tokens):
        chunks = []
        if mixed is not None:
            chunks = [_mixed_chunk(loaded.layout.flatten(mixed_caches), step)]
        order = batch.begin_step(chunks)
        ids = [token] * len(order)
        for chunk in chunks:
            assert mixed is not None, "only a mixed chunk makes chunks"
            ids += mixed[chunk.position : chunk.position + chunk.num_tokens]
        logits = loaded.model(mx.array(ids, dtype=mx.int32)[:, None], cache=batch.caches)
        batch.end_step()
        for row, key in enumerate(order):
            rows[key].append(logits[row, -1])
    found = [mx.stack(row) for row in rows]
    return found if mixed is None else [*found, continued(loaded, mixed_caches, tokens)[0]]


def _batch_of(
    loaded: LoadedModel, form: BatchForm, prompts: list[list[int]], *, spread: bool = False
) -> BatchCaches:
    """Return a batch of these prompts. ``spread``: the last one in a slab of its own."""
    assert loaded.batch is not None, "there is nothing to check"
    batch = BatchCaches(loaded.layout, form, loaded.batch.state_sizes)
    for key, prompt in enumerate(prompts):
        content = read_caches(loaded.layout, prefilled(loaded, prompt), len(prompt))
        assert content is not None, "a state is not written by a whole prompt"
        wide = spread and key == len(prompts) - 1
        batch.join(key, content, room=2 * MIN_WIDTH if wide else MIN_WIDTH)
    return batch


def _mixed_chunk(caches: list[Any], step: int) -> MixedChunk:
    size = LENGTHS[MIXED] // STEPS
    return MixedChunk(caches, position=step * size, num_tokens=size)


@contextmanager
def narrowed(model: Any) -> Iterator[bool]:
    """Lower the limit of tokens that sparse attention chooses, so that few tokens reach it.

    Yields whether the model chooses at all. With fewer tokens than the limit such a model uses all,
    so a check with short prompts would prove nothing.
    """
    before: list[tuple[Any, str, int]] = []
    for _, module in model.named_modules():
        for name, small in _CHOICES.items():
            value = getattr(module, name, None)
            if isinstance(value, int) and value > small:
                before.append((module, name, value))
                setattr(module, name, small)
    try:
        yield bool(before)
    finally:
        for module, name, value in before:
            setattr(module, name, value)
