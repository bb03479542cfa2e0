"""The routing policies, and the conditions for granting to an owner."""

import random
from collections.abc import Sequence

import pytest

from mlx_dp.orchestrator.control.routing import policies
from mlx_dp.orchestrator.control.routing.policies import (
    EXPLICIT_RANK,
    METHODS,
    PolicyRow,
    routing_reasons,
)
from mlx_dp.orchestrator.control.routing.router import Router
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.proto.errors import ConfigError
from tests.support.control.control_world import request_table
from tests.support.control.fake_worker import generation, ready


def ranks_of(*readies, ahead: int = 0) -> RankTable:
    ranks = RankTable(ahead=ahead)
    for index, each in enumerate(readies):
        ranks.add(index, f"w{index}-0", each, 0.0)
    return ranks


def router_of(policy: str) -> Router:
    return Router(policy, random.Random(0))


def send(
    router: Router, ranks: RankTable, table: RequestTable, max_tokens: int = 4, **wanted
) -> tuple[Owner, Grant] | None:
    entry = table.open(generation(max_tokens=max_tokens, **wanted), max_tokens, 0.0)
    choice = router.choose(tuple(ranks.owners()), entry)
    if choice is None:
        return None
    table.grant(entry, choice.owner.dp_rank, choice.terms.max_tokens, 0.0)
    return choice.owner, choice.owner.grant(entry, choice.terms, 0.0)


def chosen(router: Router, ranks: RankTable, times: int, **wanted) -> list[int | None]:
    table = request_table()
    grants = [send(router, ranks, table, **wanted) for _ in range(times)]
    return [None if each is None else each[0].dp_rank for each in grants]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'shortest_queue' is unknown: use one of round_robin"):
        router_of("shortest_queue")


@pytest.mark.parametrize("policy", METHODS)
def test_equal_owners_take_turns_from_the_first_request_on(policy: str) -> None:
    ranks = ranks_of(*[ready(slots=4)] * 3)
    assert chosen(router_of(policy), ranks, 6) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("policy", METHODS)
def test_full_owners_are_passed_over_and_none_is_left_means_wait(policy: str) -> None:
    ranks = ranks_of(ready(slots=1), ready(slots=2))
    assert chosen(router_of(policy), ranks, 4) == [0, 1, 1, None]


@pytest.mark.parametrize("policy", METHODS)
@pytest.mark.parametrize("hold", Hold)
def test_owners_that_take_nothing_are_passed_over(policy: str, hold: Hold) -> None:
    ranks = ranks_of(ready(), ready())
    ranks.get(0).holds.add(hold)
    assert chosen(router_of(policy), ranks, 3) == [1, 1, None]


def test_without_a_ready_owner_requests_wait() -> None:
    assert chosen(router_of("total_tokens"), RankTable(), 1) == [None]


def test_total_requests_counts_requests_and_total_tokens_counts_tokens() -> None:
    table = request_table()
    for policy, expected in (("total_requests", 0), ("total_tokens", 1)):
        ranks = ranks_of(ready(slots=9), ready(slots=9))
        router = router_of(policy)
        assert send(router, ranks, table, prompt=(1,) * 50) is not None
        assert send(router, ranks, table, prompt=(1,)) is not None
        found = send(router, ranks, table, prompt=(1,))
        assert found is not None
        assert found[0].dp_rank == expected, policy


def test_tokens_are_charged_as_they_come() -> None:
    ranks = ranks_of(ready(slots=9), ready(slots=9))
    router, table = router_of("total_tokens"), request_table()
    first = send(router, ranks, table)
    send(router, ranks, table)
    assert first is not None
    owner, grant = first
    owner.note_accepted(grant)
    owner.note_prefilled(grant)
    owner.note_tokens(grant, 3)
    assert owner.prefilling == 0
    assert chosen(router, ranks, 1) == [1]
    owner.check()


def test_a_request_that_does_not_fit_the_free_tokens_waits() -> None:
    ranks = ranks_of(ready(slots=9, pool=20))
    router, table = router_of("total_requests"), request_table()
    held = send(router, ranks, table, max_tokens=10)
    assert held is not None
    assert send(router, ranks, table, max_tokens=10) is None
    held[0].release(held[1])
    assert send(router, ranks, table, max_tokens=10) is not None


def test_an_owner_without_a_token_pool_is_bounded_by_its_slots() -> None:
    ranks = ranks_of(ready(slots=3, pool=None))
    assert chosen(router_of("total_tokens"), ranks, 4, max_tokens=900) == [0, 0, 0, None]


def test_an_explicit_rank_waits_for_its_owner_and_does_not_move_the_rotation() -> None:
    ranks = ranks_of(*[ready(slots=2)] * 3)
    router = router_of("round_robin")
    assert chosen(router, ranks, 1) == [0]
    assert chosen(router, ranks, 3, rank=2) == [2, 2, None]
    assert chosen(router, ranks, 1) == [1]


def test_owners_to_avoid_are_kept_free() -> None:
    ranks = ranks_of(ready(), ready())
    entry = request_table().open(generation(), 4, 0.0)
    router = router_of("round_robin")
    choice = router.choose(tuple(ranks.owners()), entry, avoid=frozenset({0}))
    assert choice is not None
    assert choice.owner.dp_rank == 1


def test_an_owner_may_be_granted_ahead_of_its_slots() -> None:
    ranks = ranks_of(ready(slots=2), ahead=1)
    assert chosen(router_of("round_robin"), ranks, 4) == [0, 0, 0, None]


def test_without_a_budget_a_request_gets_what_its_owner_has_left() -> None:
    ranks = ranks_of(ready(pool=30))
    entry = request_table().open(generation(max_tokens=None), None, 0.0)
    choice = router_of("round_robin").choose(tuple(ranks.owners()), entry)
    assert choice is not None
    assert choice.terms.max_tokens == 28
    assert choice.terms.reserved_tokens == 30


@pytest.mark.parametrize("policy", METHODS)
def test_a_policy_gives_no_reason_that_its_row_does_not_name(policy: str) -> None:
    ranks, table = ranks_of(ready(slots=9), ready(slots=9)), request_table()
    router = router_of(policy)
    seen = set()
    for prompt in ((1,) * 200, (1,) * 200, (2,) * 300, (1,) * 400):
        for rank in (None, 1):
            wanted = generation(prompt, rank=rank)
            placement = router.choose(
                tuple(ranks.owners()), table.open(wanted, wanted.max_tokens, 0.0)
            )
            assert placement is not None
            router.note_held(placement.owner, table.open(wanted, wanted.max_tokens, 0.0))
            seen.add(placement.reason)
    assert EXPLICIT_RANK in seen
    assert seen <= set(routing_reasons(policy))


def test_a_new_policy_is_one_row_of_the_table_with_random_numbers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stateful policy: it remembers its choices, and forgets lost owners."""

    class Fickle:
        def __init__(self, rng: random.Random) -> None:
            self.rng = rng
            self.held: set[int] = set()

        def best(self, owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
            return [self.rng.choice([each for each in owners if each.dp_rank not in self.held])]

        def reason(self, owner: Owner, entry: RequestEntry) -> str:
            return "fickle"

        def cached_tokens(self, owner: Owner, entry: RequestEntry) -> int:
            return 0

        def note_held(self, owner: Owner, entry: RequestEntry) -> None:
            self.held.add(owner.dp_rank)

        def forget_owner(self, index: int) -> None:
            self.held.discard(index)

    row = PolicyRow(Fickle, ("fickle",))
    monkeypatch.setattr(policies, "POLICIES", {**policies.POLICIES, "fickle": row})
    ranks, entry = ranks_of(ready(), ready(), ready()), request_table().open(generation(), 4, 0.0)
    made = Router("fickle", random.Random(7))
    chosen_ones = []
    for _ in range(3):
        placement = made.choose(tuple(ranks.owners()), entry)
        assert placement is not None
        assert placement.reason == "fickle"
        made.note_held(placement.owner, entry)
        chosen_ones.append(placement.owner.dp_rank)
    assert sorted(chosen_ones) == [0, 1, 2]
    made.forget_owner(1)
    placement = made.choose(tuple(ranks.owners()), entry)
    assert placement is not None and placement.owner.dp_rank == 1
    assert policies.routing_reasons("fickle") == (EXPLICIT_RANK, "fickle")
