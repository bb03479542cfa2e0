"""Repetition, presence and frequency penalties of the rows that have them."""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest


class Penalties:
    """Counts of answer tokens and marks of prompt tokens, [penalised rows, vocab].

    The counts live on the device, because a step is built before the last one's tokens are read.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keys: list[int] = []
        self._rows = mx.zeros((0,), dtype=mx.int32)
        self._in_prompt = mx.zeros((0, vocab_size), dtype=mx.bool_)
        self._counts = mx.zeros((0, vocab_size))
        self._repetition = mx.zeros((0, 1))
        self._presence = mx.zeros((0, 1))
        self._frequency = mx.zeros((0, 1))

    def set_rows(self, keys: Sequence[int], requests: Sequence[EngineRequest]) -> None:
        """Take the batch's rows. A key that was here before keeps its counts."""
        rows = [i for i, request in enumerate(requests) if _penalised(request.params)]
        if not rows and not self._keys:
            return
        before = {key: index for index, key in enumerate(self._keys)}
        marks, counts = [], []
        for row in rows:
            known = before.get(keys[row])
            if known is None:
                marks.append(self._mark(requests[row].prompt_ids))
                counts.append(self._count(requests[row].output_ids))
            else:
                marks.append(self._in_prompt[known])
                counts.append(self._counts[known])
        self._keys = [keys[row] for row in rows]
        self._rows = mx.array(rows, dtype=mx.int32)
        if not rows:
            return
        self._in_prompt, self._counts = mx.stack(marks), mx.stack(counts)
        params = [requests[row].params for row in rows]
        self._repetition = mx.array([p.repetition_penalty for p in params])[:, None]
        self._presence = mx.array([p.presence_penalty for p in params])[:, None]
        self._frequency = mx.array([p.frequency_penalty for p in params])[:, None]

    def apply(self, logits: mx.array) -> mx.array:
        """Penalise the rows of [rows, vocab] that asked for it."""
        if not self._keys:
            return logits
        own = logits[self._rows]
        answered = self._counts > 0
        seen = answered | self._in_prompt
        weakened = mx.where(own > 0, own / self._repetition, own * self._repetition)
        own = mx.where(seen, weakened, own)
        own = own - self._presence * answered - self._frequency * self._counts
        edited = mx.array(logits)  # the assignment would change the caller's array
        edited[self._rows] = own
        return edited

    def count(self, tokens: mx.array) -> None:
        """Count the tokens [rows] that the step drew."""
        if not self._keys:
            return
        index = mx.arange(len(self._keys), dtype=mx.int32)
        self._counts = self._counts.at[index, tokens[self._rows]].add(1.0)

    def arrays(self) -> list[mx.array]:
        return [self._counts, self._in_prompt] if self._keys else []

    def _mark(self, ids: Sequence[int]) -> mx.array:
        marks = mx.zeros((self._vocab_size,), dtype=mx.bool_)
        marks[mx.array(list(ids))] = True
        return marks

    def _count(self, ids: Sequence[int]) -> mx.array:
        counts = mx.zeros((self._vocab_size,))
        if ids:
            times = Counter(ids)
            counts[mx.array(list(times))] = mx.array([float(n) for n in times.values()])
        return counts


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
