"""Bit masks of allowed tokens, applied to logits on the device."""

from typing import Final

import mlx.core as mx

from mlx_dp.worker.grammar.masks import RowMasks

_WORD: Final = 32
# Far beyond any logit, and still finite after a division by the smallest temperature.
_HUGE: Final = 1e30


def apply_masks(logits: mx.array, masks: RowMasks) -> mx.array:
    """Set the logits [rows, vocab] of tokens that a row's mask excludes to -inf.

    Logits of allowed tokens become finite, so one of them is drawn even if the model returns NaN.
    """
    vocab_size = logits.shape[-1]
    words = mx.array(masks.bits)
    assert words.shape[-1] * _WORD >= vocab_size, (words.shape, vocab_size)
    bits = (words[:, :, None] >> mx.arange(_WORD, dtype=mx.int32)) & 1
    allowed = bits.reshape(len(masks.rows), -1)[:, :vocab_size].astype(mx.bool_)
    all_rows = len(masks.rows) == logits.shape[0]
    index = mx.array(masks.rows, dtype=mx.int32)
    own = mx.nan_to_num(logits if all_rows else logits[index])
    own = mx.where(allowed, mx.clip(own, -_HUGE, _HUGE), -mx.inf)
    if all_rows:
        return own
    edited = mx.array(logits)  # the assignment would change the caller's array
    edited[index] = own
    return edited
