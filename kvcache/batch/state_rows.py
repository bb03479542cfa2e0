"""The auxiliary state of all requests that decode together."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_dp.kvcache.kinds import LeafArrays


class BatchedStateCache(ArraysCache):
    """One leaf's state of all rows, which the model reads and replaces.

    A subclass, since some models check the type. Every row has a real token in every step, so
    there is nothing to mask or to count.
    """

    def make_mask(self, N: int) -> None:
        """Return None: all tokens are real."""

    def advance(self, N: int) -> None:
        """Change nothing: no row is padded."""


class StateRows:
    """One row of state per request and leaf, in the batch's order.

    A state does not grow, and the model replaces it in every step. So a join or leave costs one
    extra copy of the rows.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: the number of arrays in each leaf."""
        self.caches: list[Any] = [BatchedStateCache(size) for size in sizes]
        self._order: tuple[int, ...] = ()
        self._joined: dict[int, Sequence[LeafArrays]] = {}
        self._keys: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._held())

    @property
    def num_buffers(self) -> int:
        return len(self._held())

    def _held(self) -> list[mx.array]:
        joined = [a for leaves in self._joined.values() for leaf in leaves for a in leaf]
        return [*self.arrays(), *joined]

    def join(self, key: int, state: Sequence[LeafArrays]) -> None:
        """Add a row with its state, [1, ...] per array."""
        assert key not in self._keys, f"row {key} is here already"
        self._keys.add(key)
        self._joined[key] = state

    def leave(self, key: int) -> None:
        """Remove a row. Its memory is freed by the next ``arrange``, or with the last row."""
        self._keys.remove(key)
        self._joined.pop(key, None)
        if not self._keys:
            self.arrange(())

    def compact(self) -> None:
        """Free the memory of rows that left. Copies the others."""
        stay = tuple(key for key in self._order if key in self._keys)
        if stay != self._order:
            self.arrange((*stay, *self._joined))
            # While lazy, the former arrays would stay alive until the next step is done.
            mx.eval(self.arrays())

    def content(self, key: int) -> list[LeafArrays]:
        """Copy a row's state. A view would keep the whole batch's state alive."""
        assert key in self._keys, f"row {key} is not here"
        if key in self._joined:
            return [tuple(mx.contiguous(a) for a in leaf) for leaf in self._joined[key]]
        row = self._order.index(key)
        return [
            tuple(mx.contiguous(a[row : row + 1]) for a in cache.cache) for cache in self.caches
        ]

    def arrange(self, order: tuple[int, ...]) -> None:
        """Put the rows into the order of the next step. Rows that are not in it are dropped."""
        if order == self._order:
            return
        place = {key: row for row, key in enumerate(self._order)}
        stay = [key for key in order if key in place]
        assert all(key in place or key in self._joined for key in order), (order, self._order)
        come = [key for key in order if key not in place]
        for leaf, cache in enumerate(self.caches):
            cache.cache = [
                self._arranged(
                    array,
                    [place[key] for key in stay],
                    [self._joined[key][leaf][index] for key in come],
                )
                for index, array in enumerate(cache.cache)
            ]
        at = {key: row for row, key in enumerate([*stay, *come])}
        if [*stay, *come] != list(order):
            final = mx.array([at[key] for key in order], dtype=mx.int32)
            for cache in self.caches:
                cache.cache = [array[final] for array in cache.cache]
        self._order = order
        self._joined = {}

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate with each step, or their graph would grow."""
        return [array for cache in self.caches for array in cache.cache if array is not None]

    @staticmethod
    def _arranged(
        array: mx.array | None, stay: Sequence[int], come: Sequence[mx.array]
    ) -> mx.array | None:
        parts: list[mx.array] = []
        if array is not None and stay:
            all_stay = list(stay) == list(range(array.shape[0]))
            parts.append(array if all_stay else array[mx.array(list(stay), dtype=mx.int32)])
        parts += come
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)
