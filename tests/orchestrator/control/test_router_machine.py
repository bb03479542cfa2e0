"""A machine in which slots and tokens must add up, and the router be right, whatever happens."""

import pytest
from control_world import generation, ready
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_dp.orchestrator.control.ledger import Ledger, RequestEntry
from mlx_dp.orchestrator.control.owner import Lease, Owner
from mlx_dp.orchestrator.control.owner_book import OwnerBook
from mlx_dp.orchestrator.control.router import METHODS, Router
from mlx_dp.proto.admission import next_tokens

FLAGS = ("closed", "suspicious", "congested", "short")
"""With any of them, an owner takes nothing."""
LOADS = {
    "total_requests": len,
    "total_tokens": lambda leases: (sum(lease.held for lease in leases), len(leases)),
}
"""What has to be least of an owner's leases, by the method that says so."""


class BookMachine(RuleBasedStateMachine):
    """Grants, releases and losses at random; nothing is handed out twice and nothing leaks.

    Nobody waits who could go, and nobody goes where more is in hand than elsewhere.
    """

    method: str

    def __init__(self) -> None:
        super().__init__()
        self.readies = {0: ready(slots=3, pool=60), 1: ready(slots=4), 2: ready(slots=4, pool=None)}
        self.book = OwnerBook()
        self.router = Router(self.method)
        self.ledger = Ledger()
        self.held: dict[int, tuple[Owner, Lease, RequestEntry]] = {}

    @initialize()
    def all_come(self) -> None:
        for index in self.readies:
            self.come(index)

    def come(self, index: int) -> None:
        self.book.add(index, f"w{index}-0", self.readies[index], 0.0)

    @rule(index=st.integers(0, 2), flag=st.sampled_from((None, *FLAGS)))
    def disturb(self, index: int, flag: str | None) -> None:
        """Come or go, or begin or end to take nothing."""
        owner = self.book.get(index)
        if owner is None:
            self.come(index)
        elif flag is None:
            self.go(index)
        else:
            setattr(owner, flag, not getattr(owner, flag))

    def go(self, index: int) -> None:
        lost = self.book.remove(index)
        mine = {each for each, (owner, _, _) in self.held.items() if owner.index == index}
        assert {lease.request_id for lease in lost} == mine
        for request_id in mine:
            del self.held[request_id]

    @rule(prompt=st.integers(1, 30), max_tokens=st.one_of(st.none(), st.integers(1, 30)))
    def grant_to_anyone(self, prompt: int, max_tokens: int | None) -> None:
        self.grant(prompt, max_tokens, None)

    @rule(prompt=st.integers(1, 30), rank=st.integers(0, 2))
    def grant_to_one(self, prompt: int, rank: int) -> None:
        self.grant(prompt, 20, rank)

    def grant(self, prompt: int, max_tokens: int | None, rank: int | None) -> None:
        wanted = generation((1,) * prompt, max_tokens, rank=rank)
        entry = self.ledger.open(wanted, 0.0)
        able = self.able(prompt, max_tokens, rank)
        choice = self.router.choose(tuple(self.book.owners()), entry)
        if choice is None:
            assert not able, f"{able} could have it"
            self.ledger.finish(entry)
            return
        assert choice.owner in able, choice
        if rank is None and self.method in LOADS:
            load = LOADS[self.method]
            loads = {owner.index: load(self.held_of(owner)) for owner in able}
            assert loads[choice.owner.index] == min(loads.values()), (choice, loads)
        self.ledger.grant(entry, choice.owner.index, 0.0)
        entry.max_tokens = choice.terms.max_tokens
        lease = choice.owner.grant(entry, choice.terms, 0.0)
        self.held[entry.request_id] = (choice.owner, lease, entry)

    def able(self, prompt: int, max_tokens: int | None, rank: int | None) -> list[Owner]:
        """The owners that could have such a request, by what is held of them here."""
        return [
            owner
            for owner in self.book.owners()
            if rank in (None, owner.index)
            and not any(getattr(owner, flag) for flag in FLAGS)
            and self.fits(owner, prompt, max_tokens)
        ]

    def fits(self, owner: Owner, prompt: int, max_tokens: int | None) -> bool:
        held = self.held_of(owner)
        capacity = owner.ready.capacity
        if len(held) == capacity.request_slots:
            return False
        pool = capacity.pool_tokens
        if pool is None:
            return True
        # The last token is never fed back. Without a budget, all that is left may be asked for.
        longest = min(pool + 1, owner.ready.context_length)
        left = max(1, longest - prompt) if max_tokens is None else max_tokens
        free = pool - sum(lease.reserved for lease in held)
        return prompt + left - 1 <= pool and next_tokens(prompt, left) <= free

    def held_of(self, owner: Owner) -> list[Lease]:
        return [lease for mine, lease, _ in self.held.values() if mine is owner]

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
            held = self.held_of(owner)
            capacity = owner.ready.capacity
            assert owner.free_slots + len(held) == capacity.request_slots
            if capacity.pool_tokens is not None:
                reserved = sum(lease.reserved for lease in held)
                assert owner.free_tokens == capacity.pool_tokens - reserved


@pytest.mark.parametrize("method", METHODS)
def test_slots_and_tokens_add_up_and_nobody_waits_in_vain(method: str) -> None:
    machine = type("BookMachine", (BookMachine,), {"method": method})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )
