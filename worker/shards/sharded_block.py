"""A block of a model with one rank's share of the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_dp.worker.shards.row_arguments import RowArguments


class BlockRunner(Protocol):
    """Runs a block on the rows of all ranks, and returns this rank's rows."""

    def run(self, block: int, rows: mx.array, shard: Callable[[mx.array], mx.array]) -> mx.array:
        """Return the sum of all ranks' shards: [n, width] in, [n, output_width] out.

        ``shard`` takes any number of rows, and returns this rank's summand for each.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One sharded block. ``width`` and ``dtype`` are of the rows that its runner gets.

    Several arguments are packed into rows of bytes; the output is always ``output_width`` numbers
    of ``output_dtype`` per row. With ``answers`` the block makes logits, and runs only on rows that
    need them.
    """

    name: str
    width: int
    dtype: mx.Dtype
    output_width: int
    output_dtype: mx.Dtype
    nbytes: int
    kept_nbytes: int
    answers: bool = False


class ShardedBlock(Module):
    """Replaces ``inner`` in a model; the weights of ``inner`` are one rank's share.

    It has the attributes of ``inner``, since models read them.
    """

    def __init__(
        self, index: int, inner: Any, runner: BlockRunner, arguments: RowArguments
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.index = index
        self.runner = runner
        self.arguments = arguments

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)

    def __call__(self, *arguments: mx.array) -> mx.array:
        rows = self.arguments.pack(arguments)
        summed = self.runner.run(self.index, rows, self.shard)
        return self.arguments.restore(summed, arguments)

    def shard(self, rows: mx.array) -> mx.array:
        """Return this rank's summand for rows of any number, of all ranks."""
        output: mx.array = self.inner(*self.arguments.unpack(rows))
        return output.reshape(rows.shape[0], -1)
