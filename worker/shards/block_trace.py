"""The calls of a model's blocks in a forward pass: their order and arguments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.worker.shards.block_finder import FoundBlock
from mlx_dp.worker.shards.row_arguments import ArgumentShape, RowArguments

_TOKENS: Final = 5
"""Tokens of the traced pass. No width in any model has this size."""


@dataclass(slots=True)
class BlockTrace:
    """The calls of one pass. ``refusals``: blocks that took or returned other things than rows."""

    calls: list[FoundBlock] = field(default_factory=list)
    arguments: dict[str, RowArguments] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def note(self, block: FoundBlock, arguments: Sequence[Any], names: bool, output: Any) -> None:
        """Record one call. ``names``: some arguments were given by name."""
        self.calls.append(block)
        shapes = None if names else _row_arguments(arguments, output)
        if shapes is None:
            self.refusals[block.name] = (
                "takes or returns something other than one row for each token"
            )
        elif self.arguments.setdefault(block.name, shapes) != shapes:
            self.refusals[block.name] = "is called with other shapes each time"


class _Recorder:
    """Stands in a block's place during the traced pass."""

    def __init__(self, block: FoundBlock, trace: BlockTrace) -> None:
        self._block = block
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block.module, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        output = self._block.module(*arguments, **named)
        self._trace.note(self._block, arguments, bool(named), output)
        return output


def trace_blocks(model: Any, blocks: Sequence[FoundBlock]) -> BlockTrace:
    """Build the graph of one pass without computing it; record how it calls these blocks."""
    trace = BlockTrace()
    every = [inner for block in blocks for inner in block.nested()]
    with _recorded(every, trace):
        model(mx.zeros((1, _TOKENS), dtype=mx.int32), cache=make_prompt_cache(model))
    return trace


@contextmanager
def _recorded(blocks: Sequence[FoundBlock], trace: BlockTrace) -> Iterator[None]:
    try:
        for block in blocks:
            block.replace_with(_Recorder(block, trace))
        yield
    finally:
        for block in blocks:
            block.replace_with(block.module)


def _row_arguments(arguments: Sequence[Any], output: Any) -> RowArguments | None:
    """Separate the axes that count tokens from the axes of each token; None: not possible."""
    if not arguments or not all(isinstance(array, mx.array) for array in (*arguments, output)):
        return None
    leading = arguments[0].shape[:-1]
    axes = len(leading)
    alike = all(array.shape[:axes] == leading for array in (*arguments, output))
    floating = mx.issubdtype(arguments[0].dtype, mx.floating)
    if not alike or not floating or sorted(leading) != [1] * (axes - 1) + [_TOKENS]:
        return None
    return RowArguments(
        leading=axes,
        inputs=tuple(_shape(array, axes) for array in arguments),
        output=_shape(output, axes),
    )


def _shape(array: mx.array, axes: int) -> ArgumentShape:
    return ArgumentShape(trailing=tuple(array.shape[axes:]), dtype=array.dtype)
