"""The kept prefixes of a request, and its states that are not needed any more."""

from mlx_dp.kvcache.prefix.lease import Lease
from mlx_dp.kvcache.prefix.prefix_cache import PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.slots.auxiliary_slots import AuxiliarySlots
from mlx_dp.worker.scheduling.memory_room import MemoryRoom
from mlx_dp.worker.scheduling.request_prefixes import RequestPrefixes
from mlx_dp.worker.scheduling.running_request import RunningRequest
from tests.support.batches.prefix_store_model import StoreModel, Text
from tests.support.models.model_shapes import DENSE, HYBRID
from tests.support.worker.worker_bench import submit

FACTS = PrefixFacts(shape=HYBRID, stateful=True)


class Owner:
    """The prefix cache of an owner that holds nothing else, with as much memory as asked."""

    def __init__(
        self, facts: PrefixFacts = FACTS, *, budget: int | None = None, states: int = 8
    ) -> None:
        self.slots = AuxiliarySlots(states)
        self.store = StoreModel()
        self.cache = PrefixCache(self.store, self.slots, facts)
        self.room = MemoryRoom(self, self.cache, budget)
        self.prefixes = RequestPrefixes(self.cache, self.room, facts)

    @property
    def held_nbytes(self) -> int:
        return self.cache.nbytes

    held_buffers = row_buffers = 0

    def growth_nbytes(self) -> int:
        return 0

    def compact(self) -> None:
        raise AssertionError("there are no rows")

    def begin(self, request_id: int, prompt: int) -> RunningRequest:
        lease = Lease(request_id=request_id, slot=request_id, auxiliary_slot=None)
        request = RunningRequest(submit(request_id, prompt=prompt), lease)
        self.prefixes.begin(request)
        return request


def fill(owner: Owner, request: RunningRequest) -> int | None:
    """Plan the rest of a prompt in one chunk; return the slot that the chunk would name."""
    point = request.fill(request.unfilled)
    assert point is not None
    slot = owner.prefixes.track(request, point)
    return owner.prefixes.insert_prompt(request, slot)


def test_a_state_that_the_tree_has_already_is_not_written_again() -> None:
    owner = Owner()
    first, second = owner.begin(1, 9), owner.begin(2, 9)
    assert fill(owner, first) is not None
    assert fill(owner, second) is None
    assert owner.slots.free_slots == 7
    for request in (first, second):
        owner.prefixes.hand_over(request)
        owner.prefixes.drop_request(request)
    owner.cache.check()


def test_without_a_free_slot_a_request_goes_without_a_snapshot() -> None:
    owner = Owner(states=1)
    first, second = owner.begin(1, 9), owner.begin(2, 20)
    assert fill(owner, first) is not None
    assert fill(owner, second) is None
    assert second.tracked == {}


def test_without_room_a_request_tracks_and_keeps_nothing() -> None:
    owner = Owner(budget=FACTS.segment_nbytes(8) - 1)
    request = owner.begin(1, 9)
    assert fill(owner, request) is None
    assert owner.prefixes.hand_over(request).saves == ()
    assert owner.prefixes.insert_ended(request) is None
    assert (owner.slots.free_slots, owner.cache.num_tokens) == (8, 0)


def test_room_for_the_state_alone_keeps_it_for_the_end() -> None:
    owner = Owner(budget=FACTS.snapshot_nbytes(8) + FACTS.segment_nbytes(8) - 1)
    request = owner.begin(1, 9)
    slot = fill(owner, request)
    assert slot is not None
    assert request.tracked == {8: slot}
    assert owner.prefixes.hand_over(request).saves == ()


def test_room_is_not_made_by_dropping_the_beginning_of_what_is_to_be_kept() -> None:
    dense = PrefixFacts(shape=DENSE)
    owner = Owner(dense, budget=dense.segment_nbytes(12))
    first = owner.begin(1, 9)
    first.fill(9)
    owner.prefixes.insert_prompt(first, None)
    owner.store.save(owner.prefixes.hand_over(first).saves, Text("", first.prompt))
    owner.room.step_launched()
    second = owner.begin(2, 17)
    assert second.cached_tokens == 8
    owner.prefixes.hand_over(second)
    second.fill(8)
    # Eight tokens more would fit without the first eight, but then sixteen are missing.
    assert owner.prefixes.insert_ended(second) is None
    assert owner.cache.num_tokens <= 12
