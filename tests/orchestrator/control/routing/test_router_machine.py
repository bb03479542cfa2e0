"""A state machine: slots and tokens add up, and the router is right, under any events."""

import random

import pytest
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

from mlx_dp.orchestrator.api import Ended
from mlx_dp.orchestrator.control.routing.policies import METHODS
from mlx_dp.orchestrator.control.routing.router import Router
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Hold, Owner
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.proto.capacity.request_limits import next_tokens
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import request_table
from tests.support.control.fake_worker import generation, ready

LOADS = {
    "total_requests": len,
    "total_tokens": lambda grants: (sum(grant.held_tokens for grant in grants), len(grants)),
}
"""The quantity that each routing method minimizes over the owners."""


class BookMachine(RuleBasedStateMachine):
    """Grants, releases and losses at random; nothing is granted twice and nothing leaks.

    No request waits that could be granted, and none goes to an owner with more load than
    another.
    """

    method: str

    def __init__(self) -> None:
        super().__init__()
        self.readies = {0: ready(slots=3, pool=60), 1: ready(slots=4), 2: ready(slots=4, pool=None)}
        self.ranks = RankTable()
        self.router = Router(self.method, random.Random(0))
        self.table = request_table()
        self.held: dict[int, tuple[Owner, Grant, RequestEntry]] = {}

    @initialize()
    def all_come(self) -> None:
        for index in self.readies:
            self.come(index)

    def come(self, index: int) -> None:
        self.ranks.add(index, f"w{index}-0", self.readies[index], 0.0)

    @rule(index=st.integers(0, 2), hold=st.sampled_from((None, *Hold)))
    def disturb(self, index: int, hold: Hold | None) -> None:
        """Join or leave, or start or stop accepting requests."""
        owner = self.ranks.get(index)
        if owner is None:
            self.come(index)
        elif hold is None:
            self.go(index)
        else:
            owner.holds ^= {hold}

    def go(self, index: int) -> None:
        lost = self.ranks.remove(index)
        mine = {each for each, (owner, _, _) in self.held.items() if owner.dp_rank == index}
        assert {grant.request_id for grant in lost} == mine
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
        entry = self.table.open(wanted, max_tokens, 0.0)
        able = self.able(prompt, max_tokens, rank)
        choice = self.router.choose(tuple(self.ranks.owners()), entry)
        if choice is None:
            assert not able, f"{able} could have it"
            self.table.finish(entry, Ended(reason=FinishReason.STOP), 0.0)
            return
        assert choice.owner in able, choice
        if rank is None and self.method in LOADS:
            load = LOADS[self.method]
            loads = {owner.dp_rank: load(self.held_of(owner)) for owner in able}
            assert loads[choice.owner.dp_rank] == min(loads.values()), (choice, loads)
        self.table.grant(entry, choice.owner.dp_rank, choice.terms.max_tokens, 0.0)
        grant = choice.owner.grant(entry, choice.terms, 0.0)
        self.held[entry.request_id] = (choice.owner, grant, entry)

    def able(self, prompt: int, max_tokens: int | None, rank: int | None) -> list[Owner]:
        """The owners that could take such a request, according to this model."""
        return [
            owner
            for owner in self.ranks.owners()
            if rank in (None, owner.dp_rank)
            and not owner.holds
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
        free = pool - sum(grant.reserved_tokens for grant in held)
        return prompt + left - 1 <= pool and next_tokens(prompt, left) <= free

    def held_of(self, owner: Owner) -> list[Grant]:
        return [grant for mine, grant, _ in self.held.values() if mine is owner]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), act=st.sampled_from(("accept", "yield", "leave", "release")))
    def change(self, data: st.DataObject, act: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        owner, grant, _ = self.held[request_id]
        match act:
            case "accept":
                owner.note_accepted(grant)
            case "yield" if grant.accepted and grant.remaining_tokens:
                owner.note_prefilled(grant)
                owner.note_tokens(grant, 1)
            case "leave":
                owner.start_abort(grant)
                owner.note_abort_sent(grant, 0.0)
            case "release":
                owner.release(grant)
                del self.held[request_id]

    @invariant()
    def adds_up(self) -> None:
        self.ranks.check()
        for owner in self.ranks.owners():
            held = self.held_of(owner)
            capacity = owner.ready.capacity
            assert owner.free_slots + len(held) == capacity.request_slots
            if capacity.pool_tokens is not None:
                reserved = sum(grant.reserved_tokens for grant in held)
                assert owner.free_tokens == capacity.pool_tokens - reserved


@pytest.mark.parametrize("method", METHODS)
def test_slots_and_tokens_add_up_and_no_request_waits_in_vain(method: str) -> None:
    machine = type("BookMachine", (BookMachine,), {"method": method})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )
