import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_dp.kvcache.lease import Lease, OwnerPools, Shortage
from mlx_dp.proto.ownership import OwnerCapacity


class OwnerPoolsMachine(RuleBasedStateMachine):
    """A request gets its share of every pool, or of none."""

    @initialize(hybrid=st.booleans(), slots=st.integers(1, 4), pool=st.integers(2, 40))
    def open(self, hybrid: bool, slots: int, pool: int) -> None:
        capacity = OwnerCapacity(
            request_slots=slots, auxiliary_slots=slots if hybrid else 0, pool_tokens=pool
        )
        self.capacity = capacity
        self.hybrid = hybrid
        self.pools = OwnerPools(capacity, hybrid=hybrid)
        self.leases: dict[int, tuple[Lease, int]] = {}
        self.next_request = 0

    @rule(tokens=st.integers(1, 20))
    def lease(self, tokens: int) -> None:
        self.next_request += 1
        leased = self.pools.lease(self.next_request, tokens)
        reserved = sum(tokens for _, tokens in self.leases.values())
        if len(self.leases) == self.capacity.request_slots:
            assert leased is Shortage.SLOTS
        elif self.capacity.pool_tokens is not None and (
            reserved + tokens > self.capacity.pool_tokens
        ):
            assert leased is Shortage.TOKENS
        else:
            assert isinstance(leased, Lease)
            assert (leased.auxiliary_slot is not None) is self.hybrid
            self.leases[self.next_request] = (leased, tokens)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.leases)))
        lease, _ = self.leases.pop(request)
        self.pools.release(lease)
        with pytest.raises(AssertionError):
            self.pools.release(lease)

    @invariant()
    def all_is_counted(self) -> None:
        if not hasattr(self, "pools"):
            return
        self.pools.check()
        assert self.pools.auxiliary_used == (len(self.leases) if self.hybrid else 0)
        assert self.pools.reserved_tokens == sum(tokens for _, tokens in self.leases.values())


TestOwnerPools = OwnerPoolsMachine.TestCase


def test_capacity_two_serves_a_thousand_requests_in_turn() -> None:
    capacity = OwnerCapacity(request_slots=2, auxiliary_slots=2, pool_tokens=100)
    pools = OwnerPools(capacity, hybrid=True)
    for request in range(1_000):
        lease = pools.lease(request, 50)
        assert isinstance(lease, Lease)
        pools.release(lease)
    pools.check()
    assert pools.auxiliary_used == 0
