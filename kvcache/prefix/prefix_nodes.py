"""The nodes of the prefix tree, each a run of tokens whose KV is one segment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
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


class PrefixNodes:
    """Nodes by number, below one root per namespace. Numbers are never reused.

    Invariant: a node begins where its parent ends, and siblings differ in their first token. A
    root has no tokens and no segment, and is removed with its last child.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._roots: dict[str, PrefixNode] = {}
        self._by_id: dict[int, PrefixNode] = {}
        self.roots: Mapping[str, PrefixNode] = MappingProxyType(self._roots)
        self.by_id: Mapping[int, PrefixNode] = MappingProxyType(self._by_id)
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def root(self, namespace: str) -> PrefixNode:
        """Return a namespace's root. The caller must add a child next: no root is empty."""
        if namespace not in self._roots:
            self._roots[namespace] = PrefixNode(
                node_id=next(self._numbers), namespace=namespace, key=(), end=0, parent=None
            )
        return self._roots[namespace]

    def add(self, parent: PrefixNode, key: tuple[int, ...], writer: int) -> PrefixNode:
        assert key[0] not in parent.children, (parent.node_id, key[0])
        node = PrefixNode(
            node_id=next(self._numbers),
            namespace=parent.namespace,
            key=key,
            end=parent.end + len(key),
            parent=parent,
            writer=writer,
        )
        parent.children[key[0]] = node
        self._by_id[node.node_id] = node
        self._num_tokens += len(key)
        return node

    def split(self, node: PrefixNode, cut: int) -> PrefixNode:
        """Put the tokens up to ``cut`` into a node of their own, and return it.

        Number and snapshot stay with the tail. A lock on the tail then covers both nodes.
        """
        assert node.start < cut < node.end, (node.start, cut, node.end)
        parent, at = parent_of(node), cut - node.start
        head = PrefixNode(
            node_id=next(self._numbers),
            namespace=node.namespace,
            key=node.key[:at],
            end=cut,
            parent=parent,
            children={node.key[at]: node},
            locks=node.locks,
            last_use=node.last_use,
            writer=node.writer,
            trimmable=node.trimmable,
        )
        parent.children[head.key[0]] = head
        node.key, node.parent = node.key[at:], head
        self._by_id[head.node_id] = head
        return head

    def remove(self, leaf: PrefixNode) -> None:
        assert not leaf.children, f"node {leaf.node_id} has children"
        parent = parent_of(leaf)
        del parent.children[leaf.key[0]]
        del self._by_id[leaf.node_id]
        self._num_tokens -= len(leaf.key)
        if parent.parent is None and not parent.children:
            del self._roots[leaf.namespace]

    def check(self) -> None:
        reached = {node.node_id: node for root in self._roots.values() for node in _below(root)}
        assert reached == self._by_id, (reached.keys(), self._by_id.keys())
        assert all(root.children for root in self._roots.values()), self._roots.keys()
        assert self._num_tokens == sum(len(node.key) for node in reached.values())
        for node in reached.values():
            assert node.key and node.start == parent_of(node).end, (node.node_id, node.start)
            assert parent_of(node).children[node.key[0]] is node, node.node_id
            assert node.namespace == parent_of(node).namespace, node.node_id


def parent_of(node: PrefixNode) -> PrefixNode:
    """Return a node's parent; a root has none."""
    assert node.parent is not None, f"node {node.node_id} is a root"
    return node.parent


def _below(root: PrefixNode) -> Iterator[PrefixNode]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
