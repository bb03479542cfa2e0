"""Packs a block's arguments into rows for the exchange, and unpacks its output."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentShape:
    """The shape and type of one argument, per row."""

    trailing: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    @property
    def size(self) -> int:
        count = 1
        for length in self.trailing:
            count *= length
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArguments:
    """The shapes of a block's arguments and of its output, all but the leading axes.

    ``leading`` is the number of axes that count rows. A single argument is sent as it is; several
    are joined as bytes, since an expert's index converted to half precision could change.
    """

    leading: int
    inputs: tuple[ArgumentShape, ...]
    output: ArgumentShape

    @property
    def width(self) -> int:
        if len(self.inputs) == 1:
            return self.inputs[0].size
        return sum(shape.nbytes for shape in self.inputs)

    @property
    def dtype(self) -> mx.Dtype:
        return self.inputs[0].dtype if len(self.inputs) == 1 else mx.uint8

    def pack(self, arguments: Sequence[mx.array]) -> mx.array:
        """Return the arguments as rows [n, width]."""
        flat = [
            argument.reshape(-1, shape.size)
            for argument, shape in zip(arguments, self.inputs, strict=True)
        ]
        if len(flat) == 1:
            return flat[0]
        return mx.concatenate([array.view(mx.uint8) for array in flat], axis=-1)

    def unpack(self, rows: mx.array) -> list[mx.array]:
        """Return the block's arguments from rows: one long sequence."""
        count = rows.shape[0]
        leading = (1,) * (self.leading - 1) + (count,)
        if len(self.inputs) == 1:
            return [rows.reshape(*leading, *self.inputs[0].trailing)]
        arguments: list[mx.array] = []
        begin = 0
        for shape in self.inputs:
            part = mx.contiguous(rows[:, begin : begin + shape.nbytes])
            begin += shape.nbytes
            arguments.append(part.view(shape.dtype).reshape(*leading, *shape.trailing))
        return arguments

    def restore(self, rows: mx.array, arguments: Sequence[mx.array]) -> mx.array:
        """Return output rows with the leading axes of the arguments."""
        leading = arguments[0].shape[: self.leading]
        return rows.reshape(*leading, *self.output.trailing)
