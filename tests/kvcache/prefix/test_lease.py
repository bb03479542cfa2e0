import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_dp.kvcache.prefix.lease import Lease, OwnerPools, Shortage
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from tests.support.batches.prefix_store_model import StoreModel
from tests.support.models.model_shapes import DENSE, HYBRID


def pools(
    *, slots: int, auxiliary: int, hybrid: bool, prefix_cache: bool, windows: bool = False
) -> OwnerPools:
    capacity = OwnerCapacity(request_slots=slots, auxiliary_slots=auxiliary, pool_tokens=100)
    facts = PrefixFacts(shape=HYBRID if hybrid else DENSE, stateful=hybrid or windows)
    return OwnerPools(capacity, facts, StoreModel(), prefix_cache=prefix_cache)


class OwnerPoolsMachine(RuleBasedStateMachine):
    """A request gets a slot of every kind, or none at all."""

    @initialize(hybrid=st.booleans(), prefix_cache=st.booleans(), slots=st.integers(1, 4))
    def open(self, hybrid: bool, prefix_cache: bool, slots: int) -> None:
        self.slots = slots
        self.hybrid = hybrid
        self.pools = pools(
            slots=slots,
            auxiliary=slots if hybrid else 0,
            hybrid=hybrid,
            prefix_cache=prefix_cache,
        )
        self.leases: dict[int, Lease] = {}
        self.next_request = 0

    @rule()
    def lease(self) -> None:
        self.next_request += 1
        leased = self.pools.lease(self.next_request)
        if len(self.leases) == self.slots:
            assert leased is Shortage.SLOTS
        else:
            assert isinstance(leased, Lease)
            assert (leased.auxiliary_slot is not None) is self.hybrid
            self.leases[self.next_request] = leased

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(request)
        if self.pools.cache is not None:
            self.pools.cache.drop_request(request, {}, lease.auxiliary_slot)
        self.pools.release(lease)
        with pytest.raises(AssertionError):
            self.pools.release(lease)

    @invariant()
    def all_is_counted(self) -> None:
        if not hasattr(self, "pools"):
            return
        self.pools.check()
        assert self.pools.auxiliary_used == (len(self.leases) if self.hybrid else 0)


TestOwnerPools = OwnerPoolsMachine.TestCase


def test_a_pool_of_two_serves_a_thousand_requests_in_turn() -> None:
    owner = pools(slots=2, auxiliary=2, hybrid=True, prefix_cache=False)
    for request in range(1_000):
        lease = owner.lease(request)
        assert isinstance(lease, Lease)
        owner.release(lease)
    owner.check()
    assert owner.auxiliary_used == 0


def test_a_release_leaves_the_state_that_the_tree_holds_alone() -> None:
    owner = pools(slots=2, auxiliary=8, hybrid=True, prefix_cache=True)
    lease = owner.lease(1)
    assert isinstance(lease, Lease) and owner.cache is not None
    owner.cache.begin(1, (1, 2, 3), "")
    _, kept = owner.cache.insert_ended(1, (1, 2), lease.auxiliary_slot, {})
    owner.release(lease)
    assert kept == lease.auxiliary_slot
    assert owner.auxiliary_used == 1
    owner.check()


def test_states_of_the_tree_make_way_for_a_request() -> None:
    owner = pools(slots=1, auxiliary=1, hybrid=True, prefix_cache=True)
    for request in range(10):
        lease = owner.lease(request)
        assert isinstance(lease, Lease) and owner.cache is not None
        owner.cache.begin(request, (request, 2, 3), "")
        owner.cache.insert_ended(request, (request, 2), lease.auxiliary_slot, {})
        owner.release(lease)
        assert owner.auxiliary_used == 1


def test_without_a_state_for_it_a_request_gets_no_slot() -> None:
    owner = pools(slots=2, auxiliary=2, hybrid=True, prefix_cache=True)
    first = owner.lease(1)
    assert isinstance(first, Lease) and owner.cache is not None
    assert owner.cache.snapshot_slot(1) is not None
    assert owner.lease(2) is Shortage.STATES
    owner.cache.drop_request(1, {}, first.auxiliary_slot)


@pytest.mark.parametrize(("prefix_cache", "has_state"), [(True, True), (False, False)])
def test_windows_need_states_for_the_prefix_cache_alone(
    prefix_cache: bool, has_state: bool
) -> None:
    owner = pools(slots=2, auxiliary=0, hybrid=False, prefix_cache=prefix_cache, windows=True)
    lease = owner.lease(1)
    assert isinstance(lease, Lease)
    assert (lease.auxiliary_slot is not None) is has_state


def test_fewer_states_than_requests_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        pools(slots=2, auxiliary=1, hybrid=True, prefix_cache=True)
