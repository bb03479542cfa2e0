"""One request's row of KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_dp.kvcache.packed_arrays import copied


class LayerKV(NamedTuple):
    """Keys and values of one layer, [rows, KV heads, tokens, head dim]. Widths may differ."""

    keys: mx.array
    values: mx.array

    def tokens(self, start: int, end: int) -> "LayerKV":
        return LayerKV(self.keys[..., start:end, :], self.values[..., start:end, :])

    def row(self, index: int) -> "LayerKV":
        return LayerKV(self.keys[index : index + 1], self.values[index : index + 1])

    def copied(self) -> "LayerKV":
        """Copy keys and values into buffers of their own, never views of a larger one."""
        return LayerKV(copied(self.keys), copied(self.values))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def joined(parts: Sequence[LayerKV]) -> LayerKV:
    """Concatenate the tokens of several parts of one row."""
    if len(parts) == 1:
        return parts[0]
    return LayerKV(
        mx.concatenate([part.keys for part in parts], axis=2),
        mx.concatenate([part.values for part in parts], axis=2),
    )


@dataclass(slots=True)
class KVRow:
    """The row known by ``key``; ``length`` tokens of it hold content."""

    key: int
    length: int


def to_ring(kv: LayerKV, length: int) -> LayerKV:
    """Reorder the last tokens of ``length``: from chronological order to ring order.

    In ring order a token's index is its position modulo the number of tokens kept. Both orders are
    the same for a window that has seen no more tokens than it keeps.
    """
    kept = kv.keys.shape[2]
    return kv if length <= kept else _rolled(kv, kept - length % kept)


def from_ring(kv: LayerKV, length: int) -> LayerKV:
    """Undo ``to_ring``."""
    kept = kv.keys.shape[2]
    return kv if length <= kept else _rolled(kv, length % kept)


def _rolled(kv: LayerKV, first: int) -> LayerKV:
    """Rotate so that token ``first`` comes first."""
    kept = kv.keys.shape[2]
    if first % kept == 0:
        return kv
    return joined((kv.tokens(first, kept), kv.tokens(0, first)))
