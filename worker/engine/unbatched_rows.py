"""Rows that run unbatched: one by one, each in the model's own caches."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dp.kvcache.row_content import RowContent, cache_arrays, growth_nbytes, read_caches
from mlx_dp.worker.loading.loaded_model import LoadedModel


@dataclass(slots=True)
class _UnbatchedRow:
    caches: list[Any]
    length: int


class UnbatchedRows:
    """For models that no batch can run, and for rows whose state does not have its final shape yet.

    A row's step is the same as in mlx-lm's single-request generation.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._layout = loaded.layout
        self._rows: dict[int, _UnbatchedRow] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def num_buffers(self) -> int:
        return len(self.arrays())

    @property
    def used_tokens(self) -> int:
        return sum(row.length for row in self._rows.values())

    def growth_nbytes(self) -> int:
        """Return the bytes that the next step adds for rows whose caches are full."""
        return sum(growth_nbytes(self._layout, row.caches) for row in self._rows.values())

    def join(self, key: int, caches: list[Any], length: int) -> None:
        assert key not in self._rows, f"row {key} is here already"
        self._rows[key] = _UnbatchedRow(caches, length)

    def leave(self, key: int) -> None:
        del self._rows[key]

    def length(self, key: int) -> int:
        return self._rows[key].length

    def content(self, key: int) -> RowContent | None:
        """Return a row's content, not copied; None: a state was not written yet."""
        row = self._rows[key]
        return read_caches(self._layout, row.caches, row.length) if row.length else None

    def forward(self, key: int, token: mx.array) -> mx.array:
        """Run a row's newest token [1]; return its logits [1, vocab]."""
        row = self._rows[key]
        row.length += 1
        logits: mx.array = self._model(token[None], cache=row.caches)
        return logits[:, -1, :]

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate with each step, or their graph would grow."""
        return [array for row in self._rows.values() for array in cache_arrays(row.caches)]
