"""Drawing the next token of every row, as one graph with per-row parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlx_dp.proto.messages.events import TokenLogprob
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.grammar.masks import RowMasks
from mlx_dp.worker.sampling.hashing import draw_key
from mlx_dp.worker.sampling.logit_masks import MinTokens, apply_masks, filter_logits
from mlx_dp.worker.sampling.penalties import Penalties

_IMPOSSIBLE: Final = -9999.0


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The draws of one step, still lazy. Row ``i`` of the batch drew ``tokens[i]``.

    ``logprobs`` [rows that asked], ``top_ids`` and ``top_logprobs`` [rows that asked, most asked].
    """

    tokens: mx.array
    logprob_rows: tuple[int, ...]
    top_counts: tuple[int, ...]
    logprobs: mx.array | None
    top_ids: mx.array | None
    top_logprobs: mx.array | None

    def arrays(self) -> list[mx.array]:
        lazy = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs)
        return [array for array in lazy if array is not None]

    def read_logprobs(self) -> dict[int, TokenLogprob]:
        """Wait for the device; return the log-probabilities by batch row."""
        if self.logprobs is None:
            return {}
        chosen: list[float] = self.logprobs.tolist()  # type: ignore[assignment]
        ids: list[list[int]] = self.top_ids.tolist() if self.top_ids is not None else []  # type: ignore[assignment]
        best: list[list[float]] = (
            self.top_logprobs.tolist() if self.top_logprobs is not None else []  # type: ignore[assignment]
        )
        return {
            row: TokenLogprob(
                logprob=_finite(chosen[i]),
                top=tuple((ids[i][j], _finite(best[i][j])) for j in range(self.top_counts[i])),
            )
            for i, row in enumerate(self.logprob_rows)
        }


@dataclass(frozen=True, slots=True)
class _Bias:
    """Adds ``values[i]`` to the logit of token ``ids[i]`` in row ``rows[i]``."""

    rows: mx.array
    ids: mx.array
    values: mx.array

    def apply(self, logits: mx.array) -> mx.array:
        return logits.at[self.rows, self.ids].add(self.values)


class Sampler:
    """Samples for a batch whose rows change rarely.

    ``set_rows`` sorts the rows by what they need, so that a step computes nothing that no row
    asked for: greedy rows cost one argmax.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._penalties = Penalties(vocab_size)
        self._min_tokens = MinTokens(vocab_size)
        self._params: list[SamplingParams] = []
        self._random: list[int] = []
        self._logprob_rows: tuple[int, ...] = ()
        self._bias: _Bias | None = None

    def set_rows(self, keys: Sequence[int], requests: Sequence[EngineRequest]) -> None:
        """Take the rows of the coming steps, in batch order. A key seen before keeps its counts."""
        self._params = [request.params for request in requests]
        self._random = [i for i, p in enumerate(self._params) if not p.greedy]
        self._logprob_rows = tuple(i for i, p in enumerate(self._params) if p.logprobs is not None)
        self._bias = _bias_of(self._params)
        self._min_tokens.set_rows(requests)
        self._penalties.set_rows(keys, requests)

    def rehearse(self, request: EngineRequest, position: int) -> None:
        """Build the sampling graph for this row alone, without computing it.

        Raises any error that its parameters cause, which would otherwise fail the whole batch.
        """
        alone = Sampler(self._vocab_size)
        alone.set_rows((0,), (request,))
        alone.draw(mx.zeros((1, self._vocab_size)), (position,))

    def draw(
        self, logits: mx.array, positions: Sequence[int], masks: RowMasks | None = None
    ) -> SampledStep:
        """Draw from logits [rows, vocab]; ``positions`` are the drawn tokens' absolute ones.

        Log-probabilities are the model's own, before masks and all other changes.
        """
        logits = logits.astype(mx.float32)
        edited = logits if masks is None else apply_masks(logits, masks)
        edited = self._min_tokens.apply(edited, positions)
        edited = edited if self._bias is None else self._bias.apply(edited)
        edited = self._penalties.apply(edited)
        tokens = self._choose(edited, positions)
        self._penalties.count(tokens)
        return self._with_logprobs(tokens, logits)

    def evaluated(self) -> list[mx.array]:
        """Return the state to evaluate with each step, or its graph would grow."""
        return self._penalties.arrays()

    def _choose(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        if not self._random:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        rows = self._random
        all_rows = len(rows) == len(self._params)
        drawn = self._draw_random(logits if all_rows else logits[mx.array(rows)], positions)
        if all_rows:
            return drawn
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[mx.array(rows)] = drawn
        return tokens

    def _draw_random(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Draw one token a row from [random rows, vocab], by the Gumbel-max trick."""
        params = [self._params[row] for row in self._random]
        scaled = logits / mx.array([p.temperature for p in params])[:, None]
        scaled = filter_logits(scaled, params)
        keys = mx.array(
            [draw_key(self._params[row].seed, positions[row]) for row in self._random],
            dtype=mx.uint32,
        )
        noise = mx.vmap(lambda key: mx.random.gumbel((self._vocab_size,), key=key))(keys)
        return mx.argmax(scaled + noise, axis=-1).astype(mx.int32)

    def _with_logprobs(self, tokens: mx.array, logits: mx.array) -> SampledStep:
        rows = self._logprob_rows
        if not rows:
            return SampledStep(tokens, (), (), None, None, None)
        index = mx.array(rows)
        asked = logits[index]
        logprobs = asked - mx.logsumexp(asked, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, tokens[index][:, None], axis=-1)[:, 0]
        counts = tuple(self._params[row].logprobs or 0 for row in rows)
        most = min(max(counts), self._vocab_size)
        if most == 0:
            return SampledStep(tokens, rows, counts, chosen, None, None)
        ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
        best = mx.take_along_axis(logprobs, ids, axis=-1)
        order = mx.argsort(-best, axis=-1)
        ids = mx.take_along_axis(ids, order, axis=-1)
        best = mx.take_along_axis(best, order, axis=-1)
        counts = tuple(min(count, most) for count in counts)
        return SampledStep(tokens, rows, counts, chosen, ids, best)


def _bias_of(params: Sequence[SamplingParams]) -> _Bias | None:
    entries = [(row, *entry) for row, own in enumerate(params) for entry in own.logit_bias]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return _Bias(mx.array(rows, dtype=mx.int32), mx.array(ids, dtype=mx.int32), mx.array(values))


def _finite(logprob: float) -> float:
    """Replace -inf by -9999, as OpenAI does: JSON has no infinities.

    Also replaces NaN: a model whose logits are NaN must not end the other requests.
    """
    return logprob if logprob >= _IMPOSSIBLE else _IMPOSSIBLE
