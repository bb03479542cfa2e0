"""What the prefix cache knows of one running request."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_dp.kvcache.cached_prefix import CachedPrefix, Piece, Save
from mlx_dp.kvcache.prefix_match import Reuse
from mlx_dp.kvcache.prefix_node import PrefixNode


@dataclass(slots=True, kw_only=True)
class PrefixRequest:
    """``reuse`` and ``leaf`` are set while their paths are locked: until the step is launched.

    ``reuse`` is what the request begins with, ``leaf`` the end of what it inserted.
    """

    request_id: int
    namespace: str
    reuse: Reuse | None = None
    leaf: PrefixNode | None = None

    def held(self) -> Iterator[PrefixNode]:
        """The nodes from which paths are locked."""
        if self.reuse is not None:
            yield self.reuse.node
        if self.leaf is not None:
            yield self.leaf

    def prefix(self) -> CachedPrefix | None:
        """Name what it begins with, in the numbers of now."""
        reuse = self.reuse
        if reuse is None:
            return None
        pieces = tuple(
            Piece(node.node_id, min(node.end, reuse.num_tokens) - node.start)
            for node in reuse.node.path()
            if node.start < reuse.num_tokens
        )
        snapshot = reuse.node.snapshot if reuse.stateful else None
        return CachedPrefix(pieces=pieces, num_tokens=reuse.num_tokens, snapshot=snapshot)

    def settle(self) -> tuple[Save, ...]:
        """Name the copies that it owes, in the numbers of now; from here on they count as made."""
        path = () if self.leaf is None else self.leaf.path()
        owed = [node for node in path if node.writer == self.request_id]
        for node in owed:
            node.writer = None
        return tuple(Save(node.node_id, node.start, node.end) for node in owed)
