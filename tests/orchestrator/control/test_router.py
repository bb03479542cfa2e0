"""The policies, and what an owner must be able to take."""

import pytest
from control_world import generation, ready

from mlx_dp.orchestrator.control.ledger import Ledger
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.router import METHODS, Router
from mlx_dp.proto.errors import ConfigError

FLAGS = ("closed", "suspicious", "congested", "short")
"""With any of them, an owner takes nothing."""


def book_of(*readies, ahead: int = 0) -> OwnerBook:
    book = OwnerBook(ahead=ahead)
    for index, each in enumerate(readies):
        book.add(index, f"w{index}-0", each, 0.0)
    return book


def grant(
    router: Router, book: OwnerBook, ledger: Ledger, max_tokens: int = 4, **wanted
) -> tuple[Owner, Lease] | None:
    entry = ledger.open(generation(max_tokens=max_tokens, **wanted), 0.0)
    choice = router.choose(tuple(book.owners()), entry)
    if choice is None:
        return None
    ledger.grant(entry, choice.owner.index, 0.0)
    return choice.owner, choice.owner.grant(entry, choice.terms, 0.0)


def chosen(router: Router, book: OwnerBook, times: int, **wanted) -> list[int | None]:
    ledger = Ledger()
    grants = [grant(router, book, ledger, **wanted) for _ in range(times)]
    return [None if each is None else each[0].index for each in grants]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'shortest_queue' is unknown: use one of round_robin"):
        Router("shortest_queue")


@pytest.mark.parametrize("policy", METHODS)
def test_equal_owners_take_turns_from_the_first_request_on(policy: str) -> None:
    book = book_of(*[ready(slots=4)] * 3)
    assert chosen(Router(policy), book, 6) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("policy", METHODS)
def test_full_owners_are_passed_over_and_none_is_left_means_wait(policy: str) -> None:
    book = book_of(ready(slots=1), ready(slots=2))
    assert chosen(Router(policy), book, 4) == [0, 1, 1, None]


@pytest.mark.parametrize("policy", METHODS)
@pytest.mark.parametrize("flag", FLAGS)
def test_owners_that_take_nothing_are_passed_over(policy: str, flag: str) -> None:
    book = book_of(ready(), ready())
    setattr(book.get(0), flag, True)
    assert chosen(Router(policy), book, 3) == [1, 1, None]


def test_nobody_ready_means_wait() -> None:
    assert chosen(Router("total_tokens"), OwnerBook(), 1) == [None]


def test_total_requests_counts_requests_and_total_tokens_counts_tokens() -> None:
    ledger = Ledger()
    for policy, expected in (("total_requests", 0), ("total_tokens", 1)):
        book = book_of(ready(slots=9), ready(slots=9))
        router = Router(policy)
        assert grant(router, book, ledger, prompt=(1,) * 50) is not None
        assert grant(router, book, ledger, prompt=(1,)) is not None
        found = grant(router, book, ledger, prompt=(1,))
        assert found is not None
        assert found[0].index == expected, policy


def test_tokens_are_charged_as_they_come() -> None:
    book = book_of(ready(slots=9), ready(slots=9))
    router, ledger = Router("total_tokens"), Ledger()
    first = grant(router, book, ledger)
    grant(router, book, ledger)
    assert first is not None
    owner, lease = first
    owner.accepted(lease)
    owner.prefilled(lease)
    owner.yielded(lease, 3)
    assert owner.prefilling == 0
    assert chosen(router, book, 1) == [1]
    owner.check()


def test_a_request_that_does_not_fit_the_free_tokens_waits() -> None:
    book = book_of(ready(slots=9, pool=20))
    router, ledger = Router("total_requests"), Ledger()
    held = grant(router, book, ledger, max_tokens=10)
    assert held is not None
    assert grant(router, book, ledger, max_tokens=10) is None
    held[0].release(held[1])
    assert grant(router, book, ledger, max_tokens=10) is not None


def test_an_owner_without_a_token_pool_is_bounded_by_its_slots() -> None:
    book = book_of(ready(slots=3, pool=None))
    assert chosen(Router("total_tokens"), book, 4, max_tokens=900) == [0, 0, 0, None]


def test_an_explicit_rank_waits_for_its_owner_and_does_not_move_the_rotation() -> None:
    book = book_of(*[ready(slots=2)] * 3)
    router = Router("round_robin")
    assert chosen(router, book, 1) == [0]
    assert chosen(router, book, 3, rank=2) == [2, 2, None]
    assert chosen(router, book, 1) == [1]


def test_owners_to_avoid_are_kept_free() -> None:
    book = book_of(ready(), ready())
    entry = Ledger().open(generation(), 0.0)
    router = Router("round_robin")
    choice = router.choose(tuple(book.owners()), entry, avoid=frozenset({0}))
    assert choice is not None
    assert choice.owner.index == 1


def test_an_owner_may_be_granted_ahead_of_its_slots() -> None:
    book = book_of(ready(slots=2), ahead=1)
    assert chosen(Router("round_robin"), book, 4) == [0, 0, 0, None]


def test_without_a_budget_a_request_gets_what_its_owner_has_left() -> None:
    book = book_of(ready(pool=30))
    entry = Ledger().open(generation(max_tokens=None), 0.0)
    choice = Router("round_robin").choose(tuple(book.owners()), entry)
    assert choice is not None
    assert choice.terms.max_tokens == 28
    assert choice.terms.reserved == 30
