"""A block of a model, of which this process holds a share of the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_dp.worker.shards.row_arguments import RowArguments


class BlockRunner(Protocol):
    """Runs a block on the rows of all ranks, and gives back one's own."""

    def run(self, block: int, rows: mx.array, shard: Callable[[mx.array], mx.array]) -> mx.array:
        """Return the sum of all ranks' shards: [n, width] in, [n, output_width] out.

        ``shard`` takes any number of rows, and gives this rank's summand of each.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One sharded block. ``width`` and ``dtype`` are of the rows that its runner gets.

    A block of several arguments has them packed into rows of bytes; what comes out of it is
    ``output_width`` numbers of ``output_dtype`` a row in any case. With ``answers`` it makes
    logits, and runs only on the rows whose logits are wanted.
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
    """Stands in a model where ``inner`` stood, whose weights are one rank's share.

    A model finds the attributes of the block that it reads.
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
