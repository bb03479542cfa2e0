"""A radix tree over token ids: the cached prefixes and the numbers of their segments."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

from mlx_dp.kvcache.prefix.common_prefix import common_prefix
from mlx_dp.kvcache.prefix.eviction_queue import EvictionQueue
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.prefix.prefix_match import PrefixMatch
from mlx_dp.kvcache.prefix.prefix_nodes import PrefixNode, PrefixNodes, parent_of


class Split(NamedTuple):
    """The first ``at`` tokens of a segment of the store have become the segment ``head``."""

    segment: int
    at: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """``leaf`` has the last of the tokens, and its path is locked. ``splits`` are in order."""

    leaf: PrefixNode
    splits: tuple[Split, ...]


class PrefixTree:
    """Nodes with locks, uses and snapshots. No arrays, and no clock.

    A locked node is never evicted, nor any node above it. Locking a node counts as a use. A
    snapshot is used only when it is taken or started from, so snapshots in the middle of a long
    conversation age.
    """

    def __init__(self, facts: PrefixFacts) -> None:
        self._facts = facts
        self._nodes = PrefixNodes()
        self._uses = count(1)
        self._leaves = EvictionQueue(self._leaf_use)
        self._snapshots = EvictionQueue(self._snapshot_use)
        self._snapshot_nbytes = 0

    @property
    def num_tokens(self) -> int:
        return self._nodes.num_tokens

    @property
    def nbytes(self) -> int:
        slack = len(self._nodes.by_id) * self._facts.slack_nbytes
        return self._facts.segment_nbytes(self.num_tokens) + slack + self._snapshot_nbytes

    @property
    def namespaces(self) -> Collection[str]:
        return self._nodes.roots.keys()

    @property
    def nodes(self) -> Mapping[int, PrefixNode]:
        return self._nodes.by_id

    def match(self, ids: tuple[int, ...], namespace: str) -> PrefixMatch:
        """Return the longest match of these tokens. Changes nothing."""
        node = self._nodes.roots.get(namespace)
        matched = 0
        last: PrefixNode | None = None
        while node is not None and matched == node.end and matched < len(ids):
            node = node.children.get(ids[matched])
            if node is not None:
                last = node
                matched += common_prefix(node.key, ids, matched)
        return PrefixMatch(kv_tokens=matched, node=last)

    def insert(
        self, ids: tuple[int, ...], namespace: str, cuts: Collection[int], writer: int
    ) -> Insertion:
        """Add the missing nodes of ``ids``, so that a node ends at each cut. ``writer`` owes their
        KV.
        """
        assert ids and all(0 < cut <= len(ids) for cut in cuts), (len(ids), cuts)
        match = self.match(ids, namespace)
        shared = match.kv_tokens
        wanted = {*cuts, shared} if shared < len(ids) else set(cuts)
        splits: list[Split] = []
        leaf: PrefixNode | None = None
        if match.node is not None:
            splits = self._split_path(match.node, wanted)
            leaf = next(node for node in match.node.up() if node.start < shared)
        ends = sorted({shared, len(ids), *(cut for cut in wanted if cut > shared)})
        for start, end in pairwise(ends):
            parent = self._nodes.root(namespace) if leaf is None else leaf
            leaf = self._nodes.add(parent, ids[start:end], writer)
        assert leaf is not None, "there are tokens, so there is a node"
        self.lock(leaf)
        return Insertion(leaf=leaf, splits=tuple(splits))

    def _split_path(self, last: PrefixNode, cuts: set[int]) -> list[Split]:
        splits: list[Split] = []
        for node in last.path():
            for cut in sorted(cuts):
                if not node.start < cut < node.end:
                    continue
                at = cut - node.start
                head = self._nodes.split(node, cut)
                if node.writer is None:
                    splits.append(Split(node.node_id, at, head.node_id))
        return splits

    def lock(self, node: PrefixNode) -> None:
        """Lock a path, from this node up."""
        use = next(self._uses)
        for locked in node.up():
            locked.locks += 1
            locked.last_use = use

    def unlock(self, node: PrefixNode) -> None:
        for locked in node.up():
            assert locked.locks > 0, f"node {locked.node_id} is not locked"
            locked.locks -= 1
            self._enqueue(locked)

    def attach_snapshot(self, node: PrefixNode, slot: int) -> None:
        """Keep a snapshot of the state after the node's last token."""
        assert node.snapshot is None, f"node {node.node_id} has a snapshot"
        node.snapshot = slot
        self._snapshot_nbytes += self._facts.snapshot_nbytes(node.end)
        self._count_trimmable(node, 1)
        self.use_snapshot(node)

    def use_snapshot(self, node: PrefixNode) -> None:
        assert node.snapshot is not None, f"node {node.node_id} has no snapshot"
        node.snapshot_use = next(self._uses)
        self._enqueue(node)

    def evict_leaf(self) -> PrefixNode | None:
        """Remove the least recently used leaf without locks; return it unchanged."""
        found = self._leaves.pop()
        if found is None:
            return None
        leaf = self.nodes[found]
        assert leaf.writer is None, f"request {leaf.writer} still owes node {found}"
        if leaf.snapshot is not None:
            self._uncount_snapshot(leaf)
        self._nodes.remove(leaf)
        self._enqueue(parent_of(leaf))
        return leaf

    def evict_snapshot(self) -> int | None:
        """Take the least recently used snapshot of a node without locks; the node stays."""
        found = self._snapshots.pop()
        if found is None:
            return None
        node = self.nodes[found]
        slot = node.snapshot
        self._uncount_snapshot(node)
        node.snapshot = None
        return slot

    def _uncount_snapshot(self, node: PrefixNode) -> None:
        self._snapshot_nbytes -= self._facts.snapshot_nbytes(node.end)
        self._count_trimmable(node, -1)

    def _count_trimmable(self, node: PrefixNode, change: int) -> None:
        if node.end <= self._facts.trims_to:
            for counted in node.up():
                counted.trimmable += change

    def _enqueue(self, node: PrefixNode) -> None:
        """Push a node to the eviction queues for which it is a candidate now."""
        if self._leaf_use(node.node_id) is not None:
            self._leaves.push(node.node_id, living=len(self.nodes))
        if self._snapshot_use(node.node_id) is not None:
            self._snapshots.push(node.node_id, living=len(self.nodes))

    def _leaf_use(self, node_id: int) -> int | None:
        node = self.nodes.get(node_id)
        return None if node is None or node.children or node.locks else node.last_use

    def _snapshot_use(self, node_id: int) -> int | None:
        node = self.nodes.get(node_id)
        return None if node is None or node.snapshot is None or node.locks else node.snapshot_use

    def check(self) -> None:
        """Assert that nodes, locks and queues are consistent. Visits every node."""
        self._nodes.check()
        snapshots: list[int] = []
        nbytes = 0
        for node in self.nodes.values():
            below = node.children.values()
            own = node.snapshot is not None and node.end <= self._facts.trims_to
            assert node.trimmable == own + sum(child.trimmable for child in below), node.node_id
            assert node.locks >= sum(child.locks for child in below), node.node_id
            assert node.writer is None or node.locks, f"node {node.node_id} is owed and not locked"
            if node.snapshot is not None:
                snapshots.append(node.snapshot)
                nbytes += self._facts.snapshot_nbytes(node.end)
        assert nbytes == self._snapshot_nbytes, (nbytes, self._snapshot_nbytes)
        assert len(set(snapshots)) == len(snapshots), snapshots
