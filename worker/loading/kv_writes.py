"""Measures, when a model is loaded, whether writes of KV copy the slab on this device.

MLX writes in place only to a buffer that nothing else holds. Devices differ in how long they hold
the inputs of a step, and models in how much of a step is under way when the next one is built. So
the check runs steps as the engine does, and measures their memory.
"""

from typing import Final

import mlx.core as mx

from mlx_dp.kvcache.batch.batch_caches import BatchCaches
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.kv_batch import MIN_WIDTH
from mlx_dp.kvcache.row_content import read_caches
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.loading.row_noise import prefilled

COPIED: Final = 0.25
"""The share of a slab that steps may copy before tails are worth their cost."""
_ADDED_NBYTES: Final = 64 * 2**20
"""The size difference of the two slabs, large compared with activations."""
_MOST_WIDTHS: Final = 32
_TRIES: Final = 3
_PROMPT: Final = 32
_WARM_STEPS: Final = 2
_STEPS: Final = 4


def steps_copy(loaded: LoadedModel, form: BatchForm) -> bool:
    """Tell whether steps of this form copy the KV that they write to.

    Copies appear in every try; other uses of memory do not.
    """
    if None not in loaded.layout.kv_windows:
        return False
    return all(copied_share(loaded, form) > COPIED for _ in range(_TRIES))


def copied_share(loaded: LoadedModel, form: BatchForm) -> float:
    """Return the additional memory of steps in a wider slab, as a share of its additional bytes.

    It is 0 if steps write in place, and near 1 if they copy every layer.
    """
    shape = loaded.shape
    narrow = width = MIN_WIDTH
    while True:
        width *= 2
        added = shape.request_nbytes(width) - shape.request_nbytes(narrow)
        if added >= _ADDED_NBYTES or width >= _MOST_WIDTHS * narrow:
            break
    return (_peak_nbytes(loaded, form, width) - _peak_nbytes(loaded, form, narrow)) / added


def _peak_nbytes(loaded: LoadedModel, form: BatchForm, width: int) -> int:
    """Return the peak bytes of steps of one row, beyond the bytes of the batch itself."""
    held = mx.get_active_memory()
    assert loaded.batch is not None, "there are no slabs"
    batch = BatchCaches(loaded.layout, form, loaded.batch.state_sizes)
    prompt = [i % loaded.shape.vocab_size for i in range(_PROMPT)]
    content = read_caches(loaded.layout, prefilled(loaded, prompt), _PROMPT)
    assert content is not None, "a state is not written by a whole prompt"
    batch.join(0, content, room=width)
    del content
    _run(loaded, batch, _WARM_STEPS)
    mx.reset_peak_memory()
    _run(loaded, batch, _STEPS)
    return mx.get_peak_memory() - held - batch.nbytes


def _run(loaded: LoadedModel, batch: BatchCaches, steps: int) -> None:
    """Launch each step before the previous one is read, as the engine does."""
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    before: mx.array | None = None
    for _ in range(steps):
        batch.begin_step()
        logits = loaded.model(tokens, cache=batch.caches)
        unseen = batch.end_step()
        mx.async_eval(logits, unseen, batch.arrays())
        if before is not None:
            mx.eval(before)
        before = logits
    mx.synchronize()
