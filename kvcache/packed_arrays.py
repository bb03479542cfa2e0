"""Many arrays of few shapes, stored as one array per shape.

Metal allows a process a fixed number of buffers, and each takes whole pages: with a buffer per
layer, the KV of short prompts reaches that number long before its bytes matter.
"""

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

_Kind = tuple[tuple[int, ...], mx.Dtype]


class PackedArrays:
    """Copies of arrays [1, ...]: those of one shape and dtype are the rows of one buffer."""

    def __init__(
        self, stacks: dict[_Kind, mx.array], places: tuple[tuple[_Kind, int], ...]
    ) -> None:
        self._stacks: Final = stacks
        self._places: Final = places

    @classmethod
    def pack(cls, arrays: Sequence[mx.array]) -> "PackedArrays":
        """Pack copies, not yet evaluated; arrays without content cost nothing."""
        groups: dict[_Kind, list[mx.array]] = {}
        places: list[tuple[_Kind, int]] = []
        for array in arrays:
            assert array.shape[0] == 1, array.shape
            kind = (array.shape, array.dtype)
            group = groups.setdefault(kind, [])
            places.append((kind, len(group)))
            group.append(array)
        stacks = {kind: _stacked(group) for kind, group in groups.items()}
        return cls(stacks, tuple(places))

    @property
    def buffers(self) -> list[mx.array]:
        """The arrays that hold the content."""
        return [stack for stack in self._stacks.values() if stack.size]

    def nbytes(self, page_nbytes: int = 1) -> int:
        """Bytes that the buffers take, in whole pages."""
        return sum(-(-stack.nbytes // page_nbytes) * page_nbytes for stack in self.buffers)

    def unpacked(self) -> list[mx.array]:
        """Return the arrays in their order, as views. Do not change them."""
        # A plain index would gather, and copy.
        return [self._stacks[kind][place : place + 1] for kind, place in self._places]

    def mapped(self, change: Callable[[mx.array], mx.array]) -> "PackedArrays":
        """Pack copies of ``change(stack)`` for each stack. ``change`` keeps the first axis."""
        changed = {kind: change(stack) for kind, stack in self._stacks.items()}
        kinds = {kind: ((1, *stack.shape[1:]), stack.dtype) for kind, stack in changed.items()}
        stacks = {kinds[kind]: copied(stack) for kind, stack in changed.items()}
        return PackedArrays(stacks, tuple((kinds[kind], place) for kind, place in self._places))


def _stacked(group: Sequence[mx.array]) -> mx.array:
    # Joining a single array copies nothing.
    return mx.concatenate(list(group)) if len(group) > 1 else copied(group[0])


def copied(array: mx.array) -> mx.array:
    """Copy the array into a buffer of its own, never a view of a larger one."""
    return mx.contiguous(array) if array.size else array
