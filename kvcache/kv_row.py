"""One request's row of KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx


class LayerKV(NamedTuple):
    """Keys and values of one layer, [rows, KV heads, tokens, head dim]. Widths may differ."""

    keys: mx.array
    values: mx.array


@dataclass(slots=True)
class KVRow:
    """The row known by ``key``; ``length`` tokens of it hold content."""

    key: int
    length: int


def filled(caches: Sequence[Any], length: int) -> list[LayerKV]:
    """Views of the first ``length`` tokens in a model's own KV caches."""
    return [LayerKV(c.keys[..., :length, :], c.values[..., :length, :]) for c in caches]
