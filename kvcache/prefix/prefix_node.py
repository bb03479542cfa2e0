"""One node of the prefix tree: a run of tokens whose KV is one segment."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The tokens between its parent's end and its own.

    ``node_id`` is the number of its segment. ``end`` counts tokens from the root, and never
    changes. ``locks`` counts the holders of this node or one below it. ``writer`` is the request
    whose row must still be copied into the segment; None: the store has the segment. ``snapshot``
    is the auxiliary slot with the state after ``end`` tokens. ``trimmable`` counts the snapshots
    here and below that can be cut back to any shorter prefix.
    """

    node_id: int
    namespace: str
    key: tuple[int, ...]
    end: int
    parent: Self | None
    children: dict[int, Self] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0
    writer: int | None = None
    snapshot: int | None = None
    snapshot_use: int = 0
    trimmable: int = 0

    @property
    def start(self) -> int:
        return self.end - len(self.key)

    def up(self) -> Iterator[Self]:
        """Yield this node and its ancestors, without the root, which has no tokens."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> tuple[Self, ...]:
        """Return the nodes from below the root down to this one."""
        return tuple(self.up())[::-1]
