from collections.abc import Mapping

import pytest

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, Save, SegmentPart
from mlx_dp.kvcache.prefix.prefix_cache import Freed, PrefillStart, PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.slots.auxiliary_slots import TREE, AuxiliarySlots
from tests.support.batches.prefix_store_model import StoreModel, Text
from tests.support.models.model_shapes import DENSE, HYBRID

STATELESS = PrefixFacts(shape=DENSE)
STATEFUL = PrefixFacts(shape=HYBRID, stateful=True)


class Owner:
    """A cache, its slots and its store, with the operations of scheduler and engine."""

    def __init__(self, facts: PrefixFacts = STATEFUL, slots: int = 8) -> None:
        self.facts = facts
        self.store = StoreModel()
        self.slots = AuxiliarySlots(slots if facts.stateful else 0)
        self.cache = PrefixCache(self.store, self.slots, facts)
        self._ids = iter(range(1000, 2000))

    def slot(self, request_id: int) -> int:
        slot = self.cache.snapshot_slot(request_id)
        assert slot is not None
        return slot

    def fill(
        self, request_id: int, prompt: tuple[int, ...], points: tuple[int, ...] | None = None
    ) -> PrefillStart:
        """Prefill a prompt in one plan, tracked at its snapshot points or at those given."""
        beginning = self.cache.begin(request_id, prompt, "")
        wanted = beginning.snapshot_points if points is None else points
        tracked = {point: self.slot(request_id) for point in wanted}
        for slot in tracked.values():
            self.store.snapshot(slot, Text("", prompt))
        taken = self.cache.insert_prompt(request_id, prompt, tracked)
        assert taken == self.slots.owned_by(TREE).intersection(tracked.values())
        chunk = self.cache.hand_over(request_id)
        if chunk.prefix is not None:
            self.store.take(chunk.prefix, Text("", prompt), self.facts.trims_to)
        self.keep_states(tracked, prompt)
        self.store.save(chunk.saves, Text("", prompt))
        self.cache.check()
        return beginning

    def end(
        self,
        request_id: int,
        fed: tuple[int, ...],
        live: int | None = None,
        tracked: Mapping[int, int] | None = None,
    ) -> int | None:
        saves, kept = self.cache.insert_ended(request_id, fed, live, tracked or {})
        self.store.save(saves, Text("", fed))
        self.keep_states(tracked or {}, fed)
        if kept is not None:
            self.store.snapshot(kept, Text("", fed))
        self.cache.check()
        return kept

    def serve(self, prompt: tuple[int, ...], answer: tuple[int, ...] = ()) -> PrefillStart:
        """One request from begin to end."""
        request_id = next(self._ids)
        live = self.slot(request_id) if self.facts.stateful else None
        beginning = self.fill(request_id, prompt)
        self.end(request_id, prompt + answer, live)
        return beginning

    def keep_states(self, tracked: Mapping[int, int], ids: tuple[int, ...]) -> None:
        for point, slot in tracked.items():
            if slot in self.slots.owned_by(TREE):
                self.store.snapshot(slot, Text("", ids[:point]))

    @property
    def states(self) -> set[int]:
        """Token counts at which the tree has a state."""
        return {len(state.ids) for state in self.store.snapshots.values()}


def test_of_a_prompt_of_3_tokens_with_2_cached_one_is_run_and_the_tree_then_covers_3() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2))
    assert owner.fill(7, (1, 2, 3)) == PrefillStart(num_tokens=2, snapshot_points=())
    assert owner.cache.num_tokens == 2
    owner.end(7, (1, 2, 3))
    assert owner.cache.num_tokens == 3
    assert owner.cache.cached_tokens((1, 2, 3, 4), "") == 3


def test_a_prompt_of_70_tokens_is_split_at_64_whose_state_serves_prompts_that_part_after_it() -> (
    None
):
    owner = Owner()
    prompt = tuple(range(70))
    assert owner.serve(prompt).snapshot_points == (64, 69)
    assert owner.cache.cached_tokens((*range(67), 999), "") == 64


def test_of_a_prompt_of_257_tokens_with_64_cached_192_are_run_and_256_is_tracked() -> None:
    owner = Owner()
    owner.serve((*range(64), 999))
    assert owner.serve(tuple(range(257))) == PrefillStart(num_tokens=64, snapshot_points=(256,))
    assert owner.cache.cached_tokens(tuple(range(300)), "") == 257


def test_a_running_request_shares_its_prompt_before_it_ends() -> None:
    owner = Owner(STATELESS)
    owner.fill(1, (1, 2, 3, 4))
    assert owner.fill(2, (1, 2, 3, 4)).num_tokens == 3


def test_a_second_turn_computes_the_new_turn_alone() -> None:
    owner = Owner()
    first, answer = tuple(range(500)), (7, 8, 9)
    owner.serve(first, answer)
    assert owner.serve(first + answer + (1, 2, 3, 4)).num_tokens == 503


def test_a_prompt_that_is_cached_whole_is_run_from_its_last_token() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3), (4,))
    assert owner.cache.cached_tokens((1, 2, 3, 4), "") == 3
    assert owner.cache.begin(1, (1, 2, 3, 4), "").num_tokens == 3


def test_where_two_prompts_part_the_second_leaves_a_state_that_the_third_finds() -> None:
    owner = Owner(slots=16)
    system = tuple(range(200))
    assert owner.serve((*system, *range(1000, 1300))).num_tokens == 0
    second = owner.serve((*system, *range(2000, 2300)))
    assert second == PrefillStart(num_tokens=0, snapshot_points=(192, 448, 499))
    assert owner.serve((*system, *range(3000, 3300))).num_tokens == 192


def test_namespaces_keep_tenants_apart() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3))
    assert owner.cache.cached_tokens((1, 2, 3), "") == 2
    assert owner.cache.cached_tokens((1, 2, 3), "salt") == 0
    assert owner.cache.begin(1, (1, 2, 3), "salt").num_tokens == 0


def test_two_prompts_in_one_plan_get_the_numbers_that_hold_when_it_runs() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3, 4, 5, 6))
    for request_id, prompt in ((1, (1, 2, 3, 4, 9, 9)), (2, (1, 2, 8, 8))):
        owner.cache.begin(request_id, prompt, "")
        owner.cache.insert_prompt(request_id, prompt, {})
    first, second = owner.cache.hand_over(1), owner.cache.hand_over(2)
    assert first.prefix is not None and second.prefix is not None
    owner.store.take(first.prefix, Text("", (1, 2, 3, 4, 9, 9)), 0)
    owner.store.save(first.saves, Text("", (1, 2, 3, 4, 9)))
    owner.store.take(second.prefix, Text("", (1, 2, 8, 8)), 0)
    owner.store.save(second.saves, Text("", (1, 2, 8)))
    assert [save[1:] for save in first.saves + second.saves] == [(4, 5), (2, 3)]


def test_of_one_prompt_twice_in_one_plan_the_first_alone_owes_the_copy() -> None:
    owner = Owner(STATELESS)
    for request_id in (1, 2):
        owner.cache.begin(request_id, (1, 2, 3, 4), "")
        owner.cache.insert_prompt(request_id, (1, 2, 3, 4), {})
    assert [save[1:] for save in owner.cache.hand_over(1).saves] == [(0, 3)]
    second = owner.cache.hand_over(2)
    assert second.prefix is not None and second.prefix.num_tokens == 3
    assert second.saves == ()


def test_each_request_names_its_own_copies_in_any_order_of_asking() -> None:
    owner = Owner(STATELESS)
    for request_id, prompt in ((1, (1, 2, 3, 4)), (2, (1, 2, 5, 6))):
        owner.cache.begin(request_id, prompt, "")
        owner.cache.insert_prompt(request_id, prompt, {})
    assert [save[1:] for save in owner.cache.hand_over(2).saves] == [(2, 3)]
    assert [save[1:] for save in owner.cache.hand_over(1).saves] == [(0, 2), (2, 3)]


def test_what_a_chunk_takes_and_saves_is_named_once() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3))
    owner.fill(1, (1, 2, 3, 4))
    assert owner.cache.hand_over(1).prefix is None
    assert owner.cache.hand_over(1).saves == ()


def test_what_a_planned_chunk_names_is_not_evicted_and_afterwards_it_can_be() -> None:
    owner = Owner()
    owner.serve(tuple(range(64)), (7, 8))
    owner.cache.begin(1, (*range(64), 7, 8, 9), "")
    assert not owner.cache.evict()
    assert owner.cache.flush() == Freed(num_tokens=0, nbytes=0)
    chunk = owner.cache.hand_over(1)
    assert isinstance(chunk.prefix, CachedPrefix)
    assert chunk.prefix.snapshot in owner.store.snapshots
    assert owner.cache.evict()


def test_finished_with_64_of_70_tracked_the_tree_takes_both_slots_where_it_has_no_state() -> None:
    """The tracked slot goes to the node at 64, the live one to the node at 70."""
    owner = Owner()
    live = owner.slot(7)
    owner.cache.begin(7, tuple(range(71)), "")
    tracked = owner.slot(7)
    assert owner.end(7, tuple(range(70)), live, {64: tracked}) == live
    assert owner.states == {64, 70}
    assert owner.slots.owned_by(TREE) == {live, tracked}


def test_finished_with_64_of_70_tracked_the_live_slot_is_freed_if_70_has_a_state() -> None:
    owner = Owner()
    first = owner.slot(1)
    owner.cache.begin(1, tuple(range(71)), "")
    owner.end(1, tuple(range(70)), first)
    live = owner.slot(7)
    owner.cache.begin(7, (*range(70), 71), "")
    tracked = owner.slot(7)
    assert owner.end(7, tuple(range(70)), live, {64: tracked}) is None
    assert owner.slots.owned_by(TREE) == {first, tracked}
    assert owner.slots.free_slots == 6


def test_unfinished_the_tree_gets_the_tracked_slot_and_the_request_keeps_its_live_one() -> None:
    owner = Owner()
    live = owner.slot(7)
    owner.fill(7, tuple(range(70)))
    assert owner.states == {64, 69}
    assert owner.slots.owned_by(7) == {live}


def test_unfinished_a_tracked_slot_is_freed_if_the_tree_has_that_state() -> None:
    owner = Owner()
    owner.fill(1, tuple(range(70)))
    free = owner.slots.free_slots
    owner.fill(2, tuple(range(70)), points=(64, 69))
    assert owner.slots.free_slots == free
    assert owner.slots.owned_by(2) == frozenset()


def test_finished_without_a_tracked_boundary_the_tree_takes_the_live_slot() -> None:
    owner = Owner(slots=2)
    live = owner.slot(7)
    owner.fill(7, (1, 2, 3), points=())
    free = owner.slots.free_slots
    assert owner.end(7, (1, 2, 3, 4), live) == live
    assert owner.slots.free_slots == free
    assert owner.slots.owned_by(TREE) == {live}


def test_finished_where_the_node_has_a_state_the_live_slot_is_freed() -> None:
    owner = Owner(slots=2)
    for request_id, kept in ((1, True), (2, False)):
        live = owner.slot(request_id)
        owner.fill(request_id, (1, 2, 3), points=())
        assert (owner.end(request_id, (1, 2, 3, 4), live) == live) == kept
    assert (owner.slots.free_slots, owner.slots.tree_slots) == (1, 1)


def test_a_stale_tracked_slot_is_freed_when_the_live_one_is_inserted() -> None:
    owner = Owner()
    owner.fill(1, tuple(range(65)))
    live = owner.slot(7)
    owner.cache.begin(7, tuple(range(71)), "")
    stale = owner.slot(7)
    assert owner.end(7, tuple(range(70)), live, {64: stale}) == live
    assert stale not in owner.slots.owned_by(TREE)
    assert owner.slots.owned_by(7) == frozenset()


def test_with_the_same_count_tracked_and_live_the_live_slot_is_freed() -> None:
    owner = Owner(slots=2)
    live = owner.slot(7)
    owner.cache.begin(7, tuple(range(65)), "")
    tracked = owner.slot(7)
    assert owner.end(7, tuple(range(64)), live, {64: tracked}) is None
    assert owner.slots.owned_by(TREE) == {tracked}
    assert owner.slots.free_slots == 1


def test_the_tree_keeps_a_state_after_its_request_until_it_is_flushed() -> None:
    owner = Owner(slots=4)
    owner.serve((1, 2, 3), (4,))
    assert owner.slots.request_slots == 0
    assert owner.slots.free_slots < 4
    owner.cache.flush()
    assert owner.slots.free_slots == 4


def test_a_thousand_requests_in_turn_never_run_short_of_slots() -> None:
    owner = Owner(slots=2)
    for number in range(1000):
        owner.serve((number % 5, number % 3, number % 2), (number % 2,))
    assert owner.slots.request_slots == 0


def test_two_releases_of_one_request_free_no_slot_twice() -> None:
    owner = Owner()
    live = owner.slot(7)
    owner.fill(7, (1, 2, 3), points=())
    owner.cache.drop_request(7, {}, live)
    free = owner.slots.free_slots
    with pytest.raises(AssertionError, match="belongs to no owner"):
        owner.cache.drop_request(7, {}, live)
    with pytest.raises(KeyError):
        owner.cache.insert_ended(7, (1, 2, 3), live, {})
    assert owner.slots.free_slots == free


def test_a_preempted_request_gives_back_all_its_slots_and_the_tree_keeps_its_prompt() -> None:
    owner = Owner()
    live = owner.slot(7)
    owner.fill(7, (1, 2, 3, 4))
    tracked = owner.slot(7)
    owner.cache.drop_request(7, {5: tracked}, live)
    owner.cache.check()
    assert owner.slots.request_slots == 0
    assert owner.fill(7, (1, 2, 3, 4, 5)).num_tokens == 3


def test_a_request_that_never_began_is_dropped_with_its_slot() -> None:
    owner = Owner()
    owner.cache.drop_request(7, {}, owner.slot(7))
    owner.cache.check()
    assert owner.slots.free_slots == 8


def test_a_request_that_was_planned_and_never_ran_lets_go_of_its_prefix() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3))
    owner.cache.begin(1, (1, 2, 3, 4), "")
    owner.cache.drop_request(1, {}, None)
    owner.cache.check()
    assert owner.cache.evict()


def test_a_request_that_fed_nothing_leaves_nothing() -> None:
    owner = Owner()
    live = owner.slot(7)
    owner.cache.begin(7, (1, 2), "")
    assert owner.end(7, (), live) is None
    assert (owner.cache.num_tokens, owner.slots.free_slots) == (0, 8)


def test_when_slots_are_short_the_oldest_snapshot_makes_room_and_its_tokens_stay() -> None:
    owner = Owner(slots=2)
    for request_id, ids in ((1, (1, 1, 1)), (2, (2, 2, 2))):
        live = owner.slot(request_id)
        owner.fill(request_id, ids, points=())
        owner.end(request_id, ids, live)
    tokens = owner.cache.num_tokens
    assert owner.slots.free_slots == 0
    assert owner.cache.snapshot_slot(3) is not None
    owner.cache.check()
    assert [state.ids for state in owner.store.snapshots.values()] == [(2, 2, 2)]
    assert owner.cache.num_tokens == tokens


def test_a_used_snapshot_outlives_an_unused_one() -> None:
    owner = Owner(slots=2)
    for request_id, ids in ((1, (1, 1, 1)), (2, (2, 2, 2))):
        live = owner.slot(request_id)
        owner.fill(request_id, ids, points=())
        owner.end(request_id, ids, live)
    owner.cache.begin(3, (1, 1, 1, 1), "")
    owner.cache.hand_over(3)
    owner.slot(3)
    assert [state.ids for state in owner.store.snapshots.values()] == [(1, 1, 1)]


def test_a_state_below_the_match_brings_no_tokens_of_its_own() -> None:
    owner = Owner(PrefixFacts(shape=HYBRID, stateful=True, trims_to=100))
    live = owner.slot(1)
    owner.fill(1, (1, 2, 3, 4), points=())
    owner.end(1, (1, 2, 3, 4, 5), live)
    owner.cache.begin(2, (1, 2, 9), "")
    prefix = owner.cache.hand_over(2).prefix
    assert prefix is not None and prefix.snapshot == live
    assert [piece.num_tokens for piece in prefix.pieces] == [2]


def test_when_every_slot_is_in_use_a_request_goes_without_a_snapshot() -> None:
    owner = Owner(slots=2)
    live = owner.slot(1)
    owner.fill(1, (1, 2, 3), points=())
    owner.end(1, (1, 2, 3, 4), live)
    owner.cache.begin(2, (1, 2, 3, 4, 5), "")
    assert owner.cache.snapshot_slot(2) is not None
    assert owner.cache.snapshot_slot(2) is None


def test_asking_what_is_expected_neither_holds_nor_rejuvenates_anything() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3))
    owner.serve((5, 6, 7))
    assert owner.cache.cached_tokens((1, 2, 3, 4), "") == 3
    assert owner.cache.evict() and owner.cache.evict()
    assert owner.cache.cached_tokens((1, 2, 3, 4), "") == 0
    assert owner.cache.cached_tokens((5, 6, 7, 8), "") == 3


def test_what_an_insertion_would_add_is_known_before() -> None:
    owner = Owner()
    owner.serve((1, 2, 3))
    assert owner.cache.missing_tokens((1, 2, 3), "") == 0
    assert owner.cache.missing_tokens((1, 2, 3, 4, 5), "") == 2
    assert owner.cache.missing_tokens((1, 9), "") == 1
    assert owner.cache.missing_tokens((1, 2, 3), "salt") == 3


def test_the_state_of_a_tracked_slot_that_is_not_taken_is_forgotten() -> None:
    owner = Owner()
    owner.serve(tuple(range(70)))
    for request_id, end in ((7, False), (8, True)):
        owner.cache.begin(request_id, tuple(range(71)), "")
        slot = owner.slot(request_id)
        owner.store.snapshot(slot, Text("", tuple(range(64))))
        if end:
            owner.end(request_id, tuple(range(70)), None, {64: slot})
        else:
            owner.cache.drop_request(request_id, {64: slot}, None)
        assert owner.store.snapshots.keys() == owner.slots.owned_by(TREE)


def test_flush_reports_tokens_and_bytes_and_what_a_plan_names_stays() -> None:
    owner = Owner(STATELESS)
    owner.serve((1, 2, 3))
    owner.serve((5, 6))
    owner.cache.begin(1, (5, 6, 7), "")
    assert owner.cache.flush() == Freed(num_tokens=3, nbytes=3000)
    assert owner.cache.hand_over(1).prefix is not None
    assert owner.cache.flush() == Freed(num_tokens=2, nbytes=2000)
    assert (owner.cache.num_tokens, owner.store.num_tokens) == (0, 0)


def test_saves_say_which_of_a_requests_tokens_are_new() -> None:
    owner = Owner(STATELESS)
    owner.cache.begin(1, (1, 2, 3, 4), "")
    owner.cache.insert_prompt(1, (1, 2, 3, 4), {})
    (save,) = owner.cache.hand_over(1).saves
    assert save == Save(save.segment, 0, 3)
    owner.store.save((save,), Text("", (1, 2, 3)))
    ((last,), kept) = owner.cache.insert_ended(1, (1, 2, 3, 4, 5), None, {})
    assert (last.start, last.end, kept) == (3, 5, None)
    owner.store.save((last,), Text("", (1, 2, 3, 4, 5)))
    owner.cache.begin(2, (1, 2, 3, 4, 9), "")
    prefix = owner.cache.hand_over(2).prefix
    assert prefix == CachedPrefix(
        pieces=(SegmentPart(save.segment, 3), SegmentPart(last.segment, 1)), num_tokens=4
    )


def test_a_request_begins_once_and_its_chunk_is_handed_over_before_it_ends() -> None:
    owner = Owner(STATELESS)
    owner.cache.begin(1, (1, 2, 3), "")
    with pytest.raises(AssertionError, match="begins twice"):
        owner.cache.begin(1, (1, 2, 3), "")
    owner.cache.insert_prompt(1, (1, 2, 3), {})
    with pytest.raises(AssertionError, match="was not handed over"):
        owner.cache.insert_prompt(1, (1, 2, 3), {})
    with pytest.raises(AssertionError, match="was not handed over"):
        owner.cache.insert_ended(1, (1, 2, 3), None, {})


def test_a_stateful_prefix_is_named_with_the_state_to_begin_with() -> None:
    owner = Owner(slots=1)
    live = owner.slot(1)
    owner.fill(1, (1, 2, 3), points=())
    owner.end(1, (1, 2, 3, 4), live)
    owner.cache.begin(2, (1, 2, 3, 4, 5), "")
    prefix = owner.cache.hand_over(2).prefix
    assert prefix is not None and prefix.snapshot == live
