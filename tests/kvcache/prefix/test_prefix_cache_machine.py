"""Random requests against a store that knows the tokens of each number."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mlx_dp.kvcache.prefix.prefix_cache import PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.slots.auxiliary_slots import TREE, AuxiliarySlots
from tests.support.batches.prefix_store_model import StoreModel, Text
from tests.support.models.model_shapes import HYBRID

SIZE = 8
TRIMS_TO = 6
STATELESS = PrefixFacts(shape=HYBRID)
RECURRENT = PrefixFacts(shape=HYBRID, stateful=True)
WINDOWED = PrefixFacts(shape=HYBRID, stateful=True, trims_to=TRIMS_TO)
# Few and short, so that prompts meet.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
ANSWERS = st.lists(st.integers(0, 1), max_size=3).map(tuple)
NAMESPACES = st.sampled_from(("", "", "", "salt"))


@dataclass
class Running:
    """A request as the scheduler sees it."""

    prompt: Text
    live: int | None
    tracked: dict[int, int] = field(default_factory=dict)
    begun: bool = False
    filled: bool = False


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests are planned one after another, and then the whole plan runs."""

    @initialize(facts=st.sampled_from((STATELESS, RECURRENT, WINDOWED)))
    def open(self, facts: PrefixFacts) -> None:
        self.facts = facts
        self.store = StoreModel()
        self.slots = AuxiliarySlots(SIZE if facts.stateful else 0)
        self.cache = PrefixCache(self.store, self.slots, facts)
        self.running: dict[int, Running] = {}
        self.plan: dict[int, dict[int, int]] = {}
        self.next_id = 0

    @precondition(lambda self: len(self.running) < 3)
    @rule(ids=PROMPTS, namespace=NAMESPACES)
    def submit(self, ids: tuple[int, ...], namespace: str) -> None:
        self.next_id += 1
        live = self.cache.snapshot_slot(self.next_id)
        if live is not None or not self.facts.stateful:
            self.running[self.next_id] = Running(Text(namespace, ids), live)

    @precondition(lambda self: len(self.running) < 3 and not self.plan)
    @rule(ids=PROMPTS, namespace=NAMESPACES, answer=ANSWERS, data=st.data())
    def serve(
        self, ids: tuple[int, ...], namespace: str, answer: tuple[int, ...], data: st.DataObject
    ) -> None:
        self.submit(ids, namespace)
        if self.next_id in self.running:
            self.plan_one(self.next_id, True, data)
            self.run_the_plan()
            self.end_one(self.next_id, answer)

    @precondition(lambda self: self.unplanned(filled=False))
    @rule(whole=st.booleans(), data=st.data())
    def plan_chunk(self, whole: bool, data: st.DataObject) -> None:
        self.plan_one(data.draw(st.sampled_from(self.unplanned(filled=False))), whole, data)

    def plan_one(self, request_id: int, whole: bool, data: st.DataObject) -> None:
        request = self.running[request_id]
        ids, namespace = request.prompt.ids, request.prompt.namespace
        if not request.begun:
            expected = self.cache.cached_tokens(ids, namespace)
            beginning = self.cache.begin(request_id, ids, namespace)
            assert beginning.num_tokens == expected
            if not self.plan:
                assert expected == self.reusable(request.prompt), (ids, self.store.segments)
            request.begun = True
        states = self.track(request_id, data)
        if whole:
            taken = self.cache.insert_prompt(request_id, ids, request.tracked)
            states = {point: slot for point, slot in states.items() if slot in taken}
            request.tracked = {}
            request.filled = True
        self.plan[request_id] = states

    def track(self, request_id: int, data: st.DataObject) -> dict[int, int]:
        """Slots for states that the coming chunk leaves behind."""
        request = self.running[request_id]
        points = range(1, len(request.prompt.ids) if self.facts.stateful else 1)
        left = [point for point in points if point not in request.tracked]
        wanted = data.draw(st.sets(st.sampled_from(left), max_size=2)) if left else ()
        slots = {point: self.cache.snapshot_slot(request_id) for point in wanted}
        states = {point: slot for point, slot in slots.items() if slot is not None}
        request.tracked |= states
        return states

    @precondition(lambda self: self.plan)
    @rule()
    def run_the_plan(self) -> None:
        chunks = [
            (self.running[request_id], states, self.cache.hand_over(request_id))
            for request_id, states in self.plan.items()
        ]
        for request, states, chunk in chunks:
            if chunk.prefix is not None:
                assert (chunk.prefix.snapshot is not None) == self.facts.stateful
                self.store.take(chunk.prefix, request.prompt, self.facts.trims_to)
            for point, slot in states.items():
                self.store.snapshot(slot, request.prompt.upto(point))
            self.store.save(chunk.saves, request.prompt)
        self.plan.clear()

    @precondition(lambda self: self.unplanned(filled=True))
    @rule(answer=ANSWERS, data=st.data())
    def end(self, answer: tuple[int, ...], data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(self.unplanned(filled=True))), answer)

    def end_one(self, request_id: int, answer: tuple[int, ...]) -> None:
        request = self.running[request_id]
        self.keep(request_id, Text(request.prompt.namespace, request.prompt.ids + answer))

    @precondition(lambda self: self.unplanned(filled=False))
    @rule(data=st.data())
    def abort_while_it_prefills(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.unplanned(filled=False)))
        request = self.running[request_id]
        if request.begun:
            states = max(request.tracked, default=0)
            done = data.draw(st.integers(states, len(request.prompt.ids) - 1))
            self.keep(request_id, request.prompt.upto(done))

    def keep(self, request_id: int, fed: Text) -> None:
        request = self.running.pop(request_id)
        saves, kept = self.cache.insert_ended(request_id, fed.ids, request.live, request.tracked)
        self.store.save(saves, fed)
        if kept is not None:
            assert kept == request.live
            self.store.snapshot(kept, fed)

    @precondition(lambda self: self.unplanned())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.unplanned()))
        request = self.running.pop(request_id)
        self.cache.drop_request(request_id, request.tracked, request.live)

    @precondition(lambda self: self.cache.num_tokens > 10)
    @rule()
    def evict(self) -> None:
        before = self.cache.num_tokens
        assert self.cache.evict() == (self.cache.num_tokens < before)

    @precondition(lambda self: self.cache.num_tokens > 30)
    @rule()
    def flush(self) -> None:
        before = self.cache.num_tokens, self.cache.nbytes
        freed = self.cache.flush()
        assert before == (
            self.cache.num_tokens + freed.num_tokens,
            self.cache.nbytes + freed.nbytes,
        )
        if not self.plan:
            assert (self.cache.num_tokens, self.cache.nbytes) == (0, 0)

    def unplanned(self, filled: bool | None = None) -> list[int]:
        return [
            request_id
            for request_id, request in self.running.items()
            if request_id not in self.plan and filled in (None, request.filled)
        ]

    def reusable(self, prompt: Text) -> int:
        """From everything that the store has."""
        limit = len(prompt.ids) - 1
        if not self.facts.stateful:
            texts = [kept.text for kept in self.store.segments.values()]
            return max((shared(text, prompt, limit) for text in texts), default=0)
        longest = 0
        for slot in self.slots.owned_by(TREE):
            state = self.store.snapshots[slot]
            common = shared(state, prompt, limit)
            if common == len(state.ids) or len(state.ids) <= self.facts.trims_to:
                longest = max(longest, common)
        return longest

    @invariant()
    def the_counts_agree(self) -> None:
        self.cache.check()
        for request_id, request in self.running.items():
            live = set() if request.live is None else {request.live}
            assert self.slots.owned_by(request_id) == live.union(request.tracked.values())
        if not self.plan:
            assert self.store.num_tokens == self.cache.num_tokens
            of_tree = self.slots.owned_by(TREE)
            of_requests = {s for r in self.running.values() for s in r.tracked.values()}
            assert self.store.snapshots.keys() == of_tree | of_requests
            states = sum(
                self.facts.snapshot_nbytes(len(self.store.snapshots[slot].ids)) for slot in of_tree
            )
            assert self.cache.nbytes == states + 1000 * self.store.num_tokens


def shared(left: Text, right: Text, limit: int) -> int:
    if left.namespace != right.namespace:
        return 0
    common = 0
    while common < min(limit, len(left.ids)) and left.ids[common] == right.ids[common]:
        common += 1
    return common


TestPrefixCache = PrefixCacheMachine.TestCase
