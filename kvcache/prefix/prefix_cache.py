"""The prefix cache's bookkeeping: tree, auxiliary slots and store, kept consistent."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, PrefixStore, Save, SegmentPart
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.prefix.prefix_match import Reuse, reusable
from mlx_dp.kvcache.prefix.prefix_nodes import PrefixNode
from mlx_dp.kvcache.prefix.prefix_tree import PrefixTree
from mlx_dp.kvcache.prefix.snapshot_points import snapshot_points
from mlx_dp.kvcache.slots.auxiliary_slots import TREE, AuxiliarySlots


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStart:
    """Where a prompt's prefill starts: ``num_tokens`` are cached.

    Prefill chunks end at each of ``snapshot_points``: token counts, ascending, greater than
    ``num_tokens``. Stateless models have none.
    """

    num_tokens: int
    snapshot_points: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The content that a request's next chunk reads from the store, and saves to it afterwards."""

    prefix: CachedPrefix | None
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    num_tokens: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class PrefixRequest:
    """One running request, as the cache sees it.

    ``reuse`` is the prefix that the request starts from; ``leaf`` is the last node of the tokens
    that it inserted. Each is set while its path is locked, until the step is launched.
    """

    request_id: int
    namespace: str
    reuse: Reuse | None = None
    leaf: PrefixNode | None = None

    def locked_ends(self) -> Iterator[PrefixNode]:
        """Yield the last node of each path that the request has locked."""
        if self.reuse is not None:
            yield self.reuse.node
        if self.leaf is not None:
            yield self.leaf

    def prefix(self) -> CachedPrefix | None:
        """Return the prefix that the request starts from, by the present segment numbers."""
        reuse = self.reuse
        if reuse is None:
            return None
        pieces = tuple(
            SegmentPart(node.node_id, min(node.end, reuse.num_tokens) - node.start)
            for node in reuse.node.path()
            if node.start < reuse.num_tokens
        )
        snapshot = reuse.node.snapshot if reuse.stateful else None
        return CachedPrefix(pieces=pieces, num_tokens=reuse.num_tokens, snapshot=snapshot)

    def take_owed_saves(self) -> tuple[Save, ...]:
        """Return the copies that the request still owes, by the present segment numbers; they count
        as made from now on.
        """
        path = () if self.leaf is None else self.leaf.path()
        owed = [node for node in path if node.writer == self.request_id]
        for node in owed:
            node.writer = None
        return tuple(Save(node.node_id, node.start, node.end) for node in owed)


class PrefixCache:
    """Decides which prefixes the owner keeps, and which it drops when memory is short.

    Calls for one request: ``begin``, ``insert_prompt``, ``insert_ended``; or ``drop_request`` at
    any time. Inserting any request's tokens can split nodes, which changes segment numbers. So
    segments are named only by ``hand_over``: call it for each planned chunk, in order, once the
    plan is complete, and make no other call before the step is launched.

    A path is locked from ``begin`` or ``insert_prompt`` to ``hand_over``. Rows have copies, so
    prefixes that running requests share can be dropped before any request is preempted.
    """

    def __init__(self, store: PrefixStore, slots: AuxiliarySlots, facts: PrefixFacts) -> None:
        self._store = store
        self._slots = slots
        self._facts = facts
        self._tree = PrefixTree(facts)
        self._requests: dict[int, PrefixRequest] = {}

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def cached_tokens(self, ids: Sequence[int], namespace: str) -> int:
        """Return the number of tokens that ``begin`` would find now."""
        prompt = tuple(ids)
        reuse = reusable(self._tree.match(prompt, namespace), len(prompt) - 1, self._facts)
        return 0 if reuse is None else reuse.num_tokens

    def missing_tokens(self, ids: Sequence[int], namespace: str) -> int:
        """Return the number of tokens whose KV an insertion of ``ids`` would add."""
        return len(ids) - self._tree.match(tuple(ids), namespace).kv_tokens

    def begin(self, request_id: int, ids: Sequence[int], namespace: str) -> PrefillStart:
        """Find and lock the cached part of a prompt. The last token is never part of it."""
        assert request_id not in self._requests, f"request {request_id} begins twice"
        prompt = tuple(ids)
        assert prompt, f"request {request_id} has no tokens"
        match = self._tree.match(prompt, namespace)
        reuse = reusable(match, len(prompt) - 1, self._facts)
        self._requests[request_id] = PrefixRequest(
            request_id=request_id, namespace=namespace, reuse=reuse
        )
        if reuse is not None:
            self._tree.lock(reuse.node)
            if reuse.stateful:
                self._tree.use_snapshot(reuse.node)
        num_tokens = 0 if reuse is None else reuse.num_tokens
        points: tuple[int, ...] = ()
        if self._facts.stateful:
            points = snapshot_points(len(prompt), num_tokens, match.kv_tokens)
        return PrefillStart(num_tokens=num_tokens, snapshot_points=points)

    def snapshot_slot(self, request_id: int) -> int | None:
        """Take a slot for a request's live state or its next snapshot. If none is free, evict one
        of the tree's.

        None: all slots are in use, and the request continues without a snapshot.
        """
        slot = self._slots.alloc(request_id)
        if slot is not None:
            return slot
        evicted = self._tree.evict_snapshot()
        if evicted is None:
            return None
        self._store.drop((), (evicted,))
        self._slots.free(evicted, TREE)
        return self._slots.alloc(request_id)

    def insert_prompt(
        self, request_id: int, ids: Sequence[int], tracked: Mapping[int, int]
    ) -> frozenset[int]:
        """Insert a prompt without its last token, when its last chunk is planned.

        ``tracked`` has the slots of its snapshots by token count: the tree takes or frees each.
        Returns the slots taken; the others need not be written. The request keeps its live slot.
        """
        request = self._requests[request_id]
        assert request.leaf is None, f"request {request_id} was not handed over"
        prompt = tuple(ids)[:-1]
        if prompt:
            request.leaf = self._insert(request, prompt, tracked)
        else:
            assert not tracked, f"request {request_id} has snapshots of nothing"
        return frozenset(slot for slot in tracked.values() if self._slots.owner_of(slot) is TREE)

    def hand_over(self, request_id: int) -> Handover:
        """Return the content that the request's chunk reads and saves, once; unlock its paths."""
        request = self._requests[request_id]
        handover = Handover(prefix=request.prefix(), saves=request.take_owed_saves())
        self._unlock_paths(request)
        return handover

    def insert_ended(
        self,
        request_id: int,
        ids: Sequence[int],
        live_slot: int | None,
        tracked: Mapping[int, int],
    ) -> tuple[tuple[Save, ...], int | None]:
        """Insert all tokens that were fed, and the live state unless the tree has one there.

        Returns the copies that the store must make now, and the slot that the live state is copied
        to; None: the slot was freed.
        """
        request = self._requests.pop(request_id)
        assert request.leaf is None, f"request {request_id} was not handed over"
        fed = tuple(ids)
        snapshots = dict(tracked)
        if live_slot is not None and snapshots.setdefault(len(fed), live_slot) != live_slot:
            self._slots.free(live_slot, request_id)
        saves: tuple[Save, ...] = ()
        kept = None
        if fed:
            request.leaf = self._insert(request, fed, snapshots)
            saves = request.take_owed_saves()
            kept = live_slot if request.leaf.snapshot == live_slot else None
        else:
            self._free(request_id, *snapshots.values())
        self._unlock_paths(request)
        return saves, kept

    def drop_request(
        self, request_id: int, tracked: Mapping[int, int], live_slot: int | None
    ) -> None:
        """Free the slots and locks of a request, which may not have begun. Insert nothing."""
        self._free(request_id, *tracked.values())
        if live_slot is not None:
            self._slots.free(live_slot, request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            assert request.leaf is None, f"request {request_id} was not handed over"
            self._unlock_paths(request)

    def evict(self) -> bool:
        """Drop the least recently used leaf and its snapshot; return whether there was one."""
        leaf = self._tree.evict_leaf()
        if leaf is None:
            return False
        snapshots = () if leaf.snapshot is None else (leaf.snapshot,)
        self._store.drop((leaf.node_id,), snapshots)
        for slot in snapshots:
            self._slots.free(slot, TREE)
        return True

    def flush(self) -> Freed:
        """Drop all prefixes except those that planned chunks use."""
        num_tokens, nbytes = self.num_tokens, self.nbytes
        while self.evict():
            pass
        return Freed(num_tokens=num_tokens - self.num_tokens, nbytes=nbytes - self.nbytes)

    def check(self) -> None:
        """Assert that tree, slots and locks are consistent. Visits every node."""
        self._tree.check()
        self._slots.check()
        nodes = self._tree.nodes.values()
        kept = {node.snapshot for node in nodes if node.snapshot is not None}
        assert kept == self._slots.owned_by(TREE), (kept, self._slots.owned_by(TREE))
        held = Counter(
            node.node_id
            for request in self._requests.values()
            for end in request.locked_ends()
            for node in end.up()
        )
        assert held == {node.node_id: node.locks for node in nodes if node.locks}, held

    def _insert(
        self, request: PrefixRequest, ids: tuple[int, ...], snapshots: Mapping[int, int]
    ) -> PrefixNode:
        insertion = self._tree.insert(ids, request.namespace, snapshots.keys(), request.request_id)
        for split in insertion.splits:
            self._store.split(split.segment, split.at, split.head)
        ends = {node.end: node for node in insertion.leaf.up()}
        for num_tokens, slot in snapshots.items():
            node = ends[num_tokens]
            if node.snapshot is None:
                self._slots.give_to_tree(slot, request.request_id)
                self._tree.attach_snapshot(node, slot)
            else:
                self._free(request.request_id, slot)
        return insertion.leaf

    def _free(self, request_id: int, *slots: int) -> None:
        """Free slots of a request. The store may hold their states already."""
        if slots:
            self._store.drop((), slots)
        for slot in slots:
            self._slots.free(slot, request_id)

    def _unlock_paths(self, request: PrefixRequest) -> None:
        for node in request.locked_ends():
            self._tree.unlock(node)
        request.reuse = request.leaf = None
