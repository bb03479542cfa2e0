"""The prefix cache's bookkeeping: tree, auxiliary slots and store, kept consistent."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, PrefixStore, Save, SegmentPart
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.prefix.prefix_match import Reuse, reusable
from mlx_dp.kvcache.prefix.prefix_node import PrefixNode
from mlx_dp.kvcache.prefix.prefix_tree import PrefixTree
from mlx_dp.kvcache.prefix.snapshot_points import snapshot_points
from mlx_dp.kvcache.slots.auxiliary_slots import TREE, AuxiliarySlots


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """``num_tokens`` need not be computed. Prefill chunks end at each of ``snapshot_points``.

    The points are token counts, ascending, beyond ``num_tokens``; none for stateless models.
    """

    num_tokens: int
    snapshot_points: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Content that a request's next chunk takes from the store before it runs, and saves after."""

    prefix: CachedPrefix | None
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    num_tokens: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class PrefixRequest:
    """One running request, as the cache sees it.

    ``reuse`` and ``leaf`` are set while their paths are locked: until the step is launched. The
    request begins with ``reuse``, and ``leaf`` is the end of the tokens that it inserted.
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
        """Name the prefix that it begins with, by the present segments."""
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

    def settle(self) -> tuple[Save, ...]:
        """Name the copies that it owes, by the present segments, and count them as made."""
        path = () if self.leaf is None else self.leaf.path()
        owed = [node for node in path if node.writer == self.request_id]
        for node in owed:
            node.writer = None
        return tuple(Save(node.node_id, node.start, node.end) for node in owed)


class PrefixCache:
    """Decides which prefixes the owner keeps, and which it drops when memory is short.

    Calls for one request: ``begin``, ``prefilled``, ``ended``; ``dropped`` at any time instead.
    Numbers of segments change when nodes are split, which any request's insertion can do. So
    nothing names a segment before ``hand_over``, which is called for each planned chunk, in order,
    when the plan is complete; no other call may come between that and the step.

    A path is locked from ``begin`` or ``prefilled`` to ``hand_over``. Rows have copies, so the
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

    def expected(self, ids: Sequence[int], namespace: str) -> int:
        """Tokens that ``begin`` would find now."""
        prompt = tuple(ids)
        reuse = reusable(self._tree.match(prompt, namespace), len(prompt) - 1, self._facts)
        return 0 if reuse is None else reuse.num_tokens

    def missing(self, ids: Sequence[int], namespace: str) -> int:
        """Tokens whose KV an insertion of ``ids`` would add."""
        return len(ids) - self._tree.match(tuple(ids), namespace).kv_tokens

    def begin(self, request_id: int, ids: Sequence[int], namespace: str) -> Beginning:
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
        return Beginning(num_tokens=num_tokens, snapshot_points=points)

    def snapshot_slot(self, request_id: int) -> int | None:
        """Take a slot for a request's live state or a coming snapshot, from the tree if none is
        free.

        None: all slots are in use, and the request continues without a snapshot.
        """
        slot = self._slots.alloc(request_id)
        if slot is not None:
            return slot
        evicted = self._tree.evict_snapshot()
        if evicted is None:
            return None
        self._store.forget((), (evicted,))
        self._slots.free(evicted, TREE)
        return self._slots.alloc(request_id)

    def prefilled(
        self, request_id: int, ids: Sequence[int], tracked: Mapping[int, int]
    ) -> frozenset[int]:
        """Insert a prompt whose last chunk is in the plan, without its last token.

        ``tracked`` has the slots of its snapshots by token count: the tree takes or frees each.
        Returns those taken: the others need not be written any more. The request keeps its live
        slot.
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
        """Name the content that the request's chunk takes and saves, once, and unlock its paths."""
        request = self._requests[request_id]
        handover = Handover(prefix=request.prefix(), saves=request.settle())
        self._let_go(request)
        return handover

    def ended(
        self,
        request_id: int,
        ids: Sequence[int],
        live_slot: int | None,
        tracked: Mapping[int, int],
    ) -> tuple[tuple[Save, ...], int | None]:
        """Insert all tokens that were fed, and the live state unless their end has one already.

        Returns the copies that the store has to make now, and the slot for the live state; None:
        freed.
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
            saves = request.settle()
            kept = live_slot if request.leaf.snapshot == live_slot else None
        else:
            self._free(request_id, *snapshots.values())
        self._let_go(request)
        return saves, kept

    def dropped(self, request_id: int, tracked: Mapping[int, int], live_slot: int | None) -> None:
        """Free the slots and locks of a request that was given up, perhaps before it began."""
        self._free(request_id, *tracked.values())
        if live_slot is not None:
            self._slots.free(live_slot, request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            assert request.leaf is None, f"request {request_id} was not handed over"
            self._let_go(request)

    def evict(self) -> bool:
        """Drop the least recently used leaf, with its snapshot, if there is one to drop."""
        leaf = self._tree.evict_leaf()
        if leaf is None:
            return False
        snapshots = () if leaf.snapshot is None else (leaf.snapshot,)
        self._store.forget((leaf.node_id,), snapshots)
        for slot in snapshots:
            self._slots.free(slot, TREE)
        return True

    def flush(self) -> Freed:
        """Drop all prefixes that no planned chunk names."""
        num_tokens, nbytes = self.num_tokens, self.nbytes
        while self.evict():
            pass
        return Freed(num_tokens=num_tokens - self.num_tokens, nbytes=nbytes - self.nbytes)

    def check(self) -> None:
        """Assert that tree, slots and locks are consistent. Looks at every node."""
        self._tree.check()
        self._slots.check()
        nodes = self._tree.nodes.values()
        kept = {node.snapshot for node in nodes if node.snapshot is not None}
        assert kept == self._slots.owned_by(TREE), (kept, self._slots.owned_by(TREE))
        held = Counter(
            node.node_id
            for request in self._requests.values()
            for end in request.held()
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
                self._slots.give(slot, request.request_id)
                self._tree.attach(node, slot)
            else:
                self._free(request.request_id, slot)
        return insertion.leaf

    def _free(self, request_id: int, *slots: int) -> None:
        """Free slots of a request, whose states the store may hold already."""
        if slots:
            self._store.forget((), slots)
        for slot in slots:
            self._slots.free(slot, request_id)

    def _let_go(self, request: PrefixRequest) -> None:
        for node in request.held():
            self._tree.unlock(node)
        request.reuse = request.leaf = None
