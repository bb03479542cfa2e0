"""Records the forms of step that an engine runs, and their operations."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.worker.engine.decode_batch import DecodeBatch
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill

_SIZES = (1, 8, 64)
"""The largest pass, in tokens, with kernels of its own on Metal.

They are products with one vector, attention of few queries, and one tile of a product of matrices.
"""
_OPERATION = re.compile(r'label ="(\w+)", shape=rectangle')


class StepForms:
    """The steps since the last ``clear``, recorded at the functions that every step passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: set[str] = set()
        self.operations: set[str] = set()
        self._patch = monkeypatch
        self._watch(mx, "eval", self._computed)
        self._watch(mx, "async_eval", self._computed)
        self._watch(DecodeBatch, "launch_sampling", self._sampled)
        self._watch(DecodeCaches, "forward", self._decoded)
        self._watch(DecodeCaches, "run_chunks", lambda *_: self.forms.add("prompts together"))
        self._watch(Prefill, "run", self._ran_alone)
        self._watch(Prefill, "reuse", self._reused)
        self._watch(Segments, "split", lambda *_: self.forms.add("a cached prefix that parts"))

    def clear(self) -> None:
        self.forms, self.operations = set(), set()

    def _watch(self, owner: Any, name: str, note: Callable[..., object]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        self._patch.setattr(owner, name, watched)

    def _computed(self, *arrays: Any) -> None:
        """Record the operations of a graph that is about to be computed."""
        pending = [array for _, array in tree_flatten(list(arrays)) if isinstance(array, mx.array)]
        if pending:
            text = io.StringIO()
            mx.export_to_dot(text, *pending)
            self.operations.update(_OPERATION.findall(text.getvalue()))

    def _sampled(self, batch: DecodeBatch) -> None:
        assert batch._forward is not None
        rows = batch._forward.rows
        self.forms.add(f"a batch of up to {1 << (len(rows) - 1).bit_length()}")
        for name, asks in _ASKS.items():
            asking = sum(asks(batch, row) for row in rows)
            if asking:
                self.forms.add(f"{name} of {'all' if asking == len(rows) else 'some'} rows")

    def _decoded(self, caches: DecodeCaches, tokens_of: Any, chunks: Sequence[Any]) -> None:
        if chunks:
            self.forms.add("a mixed chunk")
        if caches._batch is not None and len(caches._batch.kv._slabs) > 1:
            self.forms.add("rows of several widths")
        if caches._unbatched.keys:
            self.forms.add("a row that is not batched")

    def _ran_alone(self, prefill: Prefill, num_tokens: int) -> None:
        most = next((size for size in _SIZES if num_tokens <= size), "any number of")
        self.forms.add(f"{most} tokens of one prompt")

    def _reused(self, prefill: Prefill, prefix: Any, segments: Segments) -> None:
        self.forms.add(f"a cached prefix with{'out' if prefix.snapshot is None else ''} state")


_ASKS: dict[str, Callable[[DecodeBatch, Any], bool]] = {
    "a grammar": lambda batch, row: row.key in batch._grammars._states,
    "random draws": lambda _, row: not row.request.params.greedy,
    "top_k": lambda _, row: not row.request.params.greedy and row.request.params.top_k > 0,
    "top_p": lambda _, row: not row.request.params.greedy and row.request.params.top_p < 1.0,
    "min_p": lambda _, row: not row.request.params.greedy and row.request.params.min_p > 0.0,
    "repetition": lambda _, row: row.request.params.repetition_penalty != 1.0,
    "presence": lambda _, row: row.request.params.presence_penalty != 0.0,
    "frequency": lambda _, row: row.request.params.frequency_penalty != 0.0,
    "logit_bias": lambda _, row: bool(row.request.params.logit_bias),
    "logprobs": lambda _, row: row.request.params.logprobs is not None,
    "best logprobs": lambda _, row: bool(row.request.params.logprobs),
    "min_tokens": lambda _, row: row.drawn < row.request.params.min_tokens,
}
"""The sampling parameters of a row in a step."""
