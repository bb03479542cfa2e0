"""Policies, and a machine in which slots and tokens must add up whatever happens."""

import pytest
from control_world import generation, ready
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.router import METHODS, Router
from mlx_dp.proto.errors import ConfigError


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
@pytest.mark.parametrize("flag", ["closed", "suspicious", "congested", "short"])
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


class BookMachine(RuleBasedStateMachine):
    """Grants, releases and losses at random; nothing is handed out twice and nothing leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.readies = {0: ready(slots=1, pool=40), 1: ready(slots=3), 2: ready(slots=2, pool=None)}
        self.book = OwnerBook()
        self.router = Router("total_tokens")
        self.ledger = Ledger()
        self.held: dict[int, tuple[Owner, Lease, RequestEntry]] = {}

    @rule(index=st.integers(0, 2))
    def come_or_go(self, index: int) -> None:
        if self.book.get(index) is None:
            self.book.add(index, f"w{index}-0", self.readies[index], 0.0)
            return
        lost = self.book.remove(index)
        mine = {each for each, (owner, _, _) in self.held.items() if owner.index == index}
        assert {lease.request_id for lease in lost} == mine
        for request_id in mine:
            del self.held[request_id]

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        rank=st.one_of(st.none(), st.integers(0, 2)),
    )
    def grant(self, prompt: int, max_tokens: int | None, rank: int | None) -> None:
        wanted = generation((1,) * prompt, max_tokens, rank=rank)
        entry = self.ledger.open(wanted, 0.0)
        choice = self.router.choose(tuple(self.book.owners()), entry)
        if choice is None:
            self.ledger.finish(entry)
            return
        assert rank in (None, choice.owner.index)
        self.ledger.grant(entry, choice.owner.index, 0.0)
        entry.max_tokens = choice.terms.max_tokens
        lease = choice.owner.grant(entry, choice.terms, 0.0)
        self.held[entry.request_id] = (choice.owner, lease, entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), act=st.sampled_from(("accept", "yield", "leave", "release")))
    def change(self, data: st.DataObject, act: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        owner, lease, _ = self.held[request_id]
        match act:
            case "accept":
                owner.accepted(lease)
            case "yield" if lease.accepted and lease.left:
                owner.prefilled(lease)
                owner.yielded(lease, 1)
            case "leave":
                owner.leave(lease)
                owner.abort_sent(lease, 0.0)
            case "release":
                owner.release(lease)
                del self.held[request_id]

    @invariant()
    def adds_up(self) -> None:
        self.book.check()
        for owner in self.book.owners():
            held = [lease for mine, lease, _ in self.held.values() if mine is owner]
            capacity = owner.ready.capacity
            assert owner.free_slots + len(held) == capacity.request_slots
            if capacity.pool_tokens is not None:
                reserved = sum(lease.reserved for lease in held)
                assert owner.free_tokens == capacity.pool_tokens - reserved


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
