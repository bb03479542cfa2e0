"""Per-row top-k, top-p and min-p, as thresholds on logits."""

from collections.abc import Sequence
from functools import reduce

import mlx.core as mx

from mlx_dp.proto.messages.sampling_params import SamplingParams


def filter_logits(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Mask all tokens of [rows, vocab] that a row's filters exclude, with -inf.

    ``logits`` are already divided by the temperature. top_k 0, top_p 1 and min_p 0 keep all.
    top_p applies within the top_k best, and keeps the token that crosses the mass. Tokens equal to
    the last one kept are kept too. The best token is always kept.
    """
    thresholds: list[mx.array] = []
    if any(p.min_p for p in params):
        floor = mx.log(mx.array([p.min_p for p in params]))[:, None]  # log(0) = -inf keeps all
        thresholds.append(mx.max(logits, axis=-1, keepdims=True) + floor)
    if any(p.top_k or p.top_p < 1.0 for p in params):
        thresholds.append(_rank_threshold(logits, params))
    if not thresholds:
        return logits
    return mx.where(logits >= reduce(mx.maximum, thresholds), logits, -mx.inf)


def _rank_threshold(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return the smallest logit [rows, 1] that the row keeps under top_k and top_p."""
    vocab = logits.shape[-1]
    top_k = [min(p.top_k, vocab) for p in params]
    # Sorting the whole vocabulary is the most expensive part of a step, so only without top_k.
    width = max(top_k) if all(top_k) else vocab
    best = logits if width >= vocab else mx.topk(logits, width, axis=-1)
    ranked = mx.sort(best, axis=-1)[:, ::-1]
    width = ranked.shape[-1]
    ranks = mx.arange(width)[None]
    limits = mx.array([k or vocab for k in top_k])[:, None]
    within = ranks < limits
    probabilities = mx.softmax(mx.where(within, ranked, -mx.inf), axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    mass = mx.array([p.top_p for p in params])[:, None]
    # top_p 1 keeps all, whatever the rounding of the sum; one that rounds to 0 keeps the best.
    kept = within & ((before < mass) | (mass >= 1.0) | (ranks == 0))
    return mx.min(mx.where(kept, ranked, mx.inf), axis=-1, keepdims=True)
