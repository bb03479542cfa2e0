import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_dp.kvcache.token_budget import KVBudget

REQUESTS = st.integers(0, 7)


class KVBudgetMachine(RuleBasedStateMachine):
    """Against a plain dictionary of promises."""

    @initialize(pool=st.none() | st.integers(0, 40))
    def open(self, pool: int | None) -> None:
        self.pool = pool
        self.budget = KVBudget(pool)
        self.promised: dict[int, int] = {}

    @rule(request=REQUESTS, tokens=st.integers(1, 20))
    def reserve(self, request: int, tokens: int) -> None:
        if request in self.promised:
            with pytest.raises(AssertionError, match="reserves twice"):
                self.budget.reserve(request, tokens)
            return
        fits = self.pool is None or sum(self.promised.values()) + tokens <= self.pool
        assert self.budget.reserve(request, tokens) is fits
        if fits:
            self.promised[request] = tokens

    @rule(request=REQUESTS)
    def release(self, request: int) -> None:
        if request in self.promised:
            self.budget.release(request)
            del self.promised[request]
        else:
            with pytest.raises(AssertionError, match="reserved nothing"):
                self.budget.release(request)

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "budget"):
            return
        self.budget.check()
        total = sum(self.promised.values())
        assert self.budget.reserved_tokens == total
        assert self.budget.free_tokens == (None if self.pool is None else self.pool - total)


TestKVBudget = KVBudgetMachine.TestCase


def test_the_pool_is_filled_to_the_last_token_and_no_further() -> None:
    budget = KVBudget(10)
    assert budget.reserve(1, 6)
    assert not budget.reserve(2, 5)
    assert budget.reserve(2, 4)
    assert budget.free_tokens == 0
    budget.release(1)
    assert budget.free_tokens == 6
