"""The life cycle of requests, and a machine that walks it at random."""

import pytest
from control_world import generation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.orchestrator.control.ledger import NEXT, Ledger, RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.life_cycle import IllegalStepError
from mlx_dp.proto.errors import ProtocolError


def running(ledger: Ledger, max_tokens: int = 10) -> RequestEntry:
    entry = ledger.open(generation(max_tokens=max_tokens), 0.0)
    ledger.grant(entry, 0, 1.0)
    ledger.accept(entry)
    return entry


def test_every_status_is_in_the_table_and_only_finished_is_final() -> None:
    assert NEXT.keys() == set(RequestStatus)
    assert [status for status, following in NEXT.items() if not following] == ["finished"]


def test_an_illegal_step_names_both_sides() -> None:
    ledger = Ledger()
    entry = running(ledger)
    ledger.finish(entry)
    with pytest.raises(IllegalStepError, match="a finished request cannot become granted"):
        ledger.grant(entry, 0, 2.0)


def test_a_request_ends_once() -> None:
    ledger = Ledger()
    entry = running(ledger)
    ledger.finish(entry)
    assert ledger.get(entry.request_id) is None
    with pytest.raises(IllegalStepError):
        ledger.finish(entry)


def test_each_grant_has_its_own_epoch() -> None:
    ledger = Ledger()
    entry = running(ledger)
    assert entry.epoch == 1
    ledger.requeue(entry)
    assert entry.epoch == 1
    assert entry.owner is None
    ledger.grant(entry, 1, 2.0)
    assert (entry.epoch, entry.owner, entry.last_owner) == (2, 1, 1)


def test_duplicates_are_dropped_and_gaps_are_protocol_errors() -> None:
    ledger = Ledger()
    entry = running(ledger)
    assert ledger.append(entry, 0, (1, 2), 1.0)
    assert not ledger.append(entry, 0, (1, 2), 1.0)
    assert not ledger.append(entry, 1, (2,), 1.0)
    for index in (1, 3):
        with pytest.raises(ProtocolError):
            ledger.append(entry, index, (2, 3), 1.0)
    assert entry.emitted == [1, 2]


def test_tokens_beyond_the_budget_or_before_acceptance_are_protocol_errors() -> None:
    ledger = Ledger()
    entry = running(ledger, max_tokens=2)
    with pytest.raises(ProtocolError, match="3 tokens of 2"):
        ledger.append(entry, 0, (1, 2, 3), 1.0)
    ledger.requeue(entry)
    ledger.grant(entry, 0, 2.0)
    with pytest.raises(ProtocolError, match="granted"):
        ledger.append(entry, 0, (1,), 1.0)


def test_an_explicit_rank_holds_until_a_token_is_out() -> None:
    ledger = Ledger()
    entry = ledger.open(generation(rank=1), 0.0)
    ledger.grant(entry, 1, 0.0)
    ledger.accept(entry)
    ledger.requeue(entry)
    assert entry.pinned == 1
    ledger.grant(entry, 1, 0.0)
    ledger.accept(entry)
    ledger.append(entry, 0, (1,), 0.0)
    ledger.requeue(entry)
    assert entry.pinned is None


def test_cached_tokens_are_those_of_the_first_owner_that_prefilled_it() -> None:
    ledger = Ledger()
    entry = ledger.open(generation(), 0.0)
    firsts = []
    for cached in (2, 3):
        ledger.grant(entry, 0, 0.0)
        ledger.accept(entry)
        assert entry.cached_tokens in (None, 2)
        firsts.append(ledger.prefilled(entry, cached))
        ledger.requeue(entry)
    assert entry.cached_tokens == 2
    assert firsts == [True, False]


def test_a_token_ends_the_row_of_losses() -> None:
    ledger = Ledger()
    entry = running(ledger)
    entry.barren_losses = entry.silent_losses = 1
    ledger.append(entry, len(entry.emitted), (1,), 0.0)
    assert (entry.barren_losses, entry.silent_losses) == (0, 0)
    ledger.check()


def test_no_more_is_cached_than_the_prompt_has() -> None:
    ledger = Ledger()
    entry = ledger.open(generation((1, 2)), 0.0)
    ledger.grant(entry, 0, 0.0)
    ledger.accept(entry)
    ledger.prefilled(entry, 9)
    assert entry.cached_tokens == 2


class LedgerMachine(RuleBasedStateMachine):
    """Steps of all kinds, legal or not, against a model that is a dictionary of words."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.entries: list[RequestEntry] = []
        self.model: list[tuple[str, int, list[int]]] = []

    def attempt(self, number: int, wanted: RequestStatus, act) -> bool:
        status, epoch, emitted = self.model[number]
        if wanted in NEXT[RequestStatus(status)]:
            act()
            epoch += wanted is RequestStatus.GRANTED
            self.model[number] = (wanted, epoch, emitted)
            return True
        with pytest.raises(IllegalStepError):
            act()
        return False

    @rule()
    def open(self) -> None:
        self.entries.append(self.ledger.open(generation(max_tokens=None), 0.0))
        self.model.append(("queued", 0, []))

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.entries) - 1))
        entry = self.entries[number]
        wanted = data.draw(st.sampled_from(RequestStatus))
        steps = {
            RequestStatus.QUEUED: lambda: self.ledger.requeue(entry),
            RequestStatus.GRANTED: lambda: self.ledger.grant(entry, 0, 0.0),
            RequestStatus.RUNNING: lambda: self.ledger.accept(entry),
            RequestStatus.FINISHED: lambda: self.ledger.finish(entry),
        }
        self.attempt(number, wanted, steps[wanted])

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), index=st.integers(0, 8), ids=st.lists(st.integers(0, 9), min_size=1))
    def append(self, data: st.DataObject, index: int, ids: list[int]) -> None:
        number = data.draw(st.integers(0, len(self.entries) - 1))
        status, _, emitted = self.model[number]
        try:
            taken = self.ledger.append(self.entries[number], index, tuple(ids), 0.0)
        except ProtocolError:
            new = index == len(emitted)
            old = index + len(ids) <= len(emitted)
            assert status != "running" or not (new or old)
            return
        assert status == "running"
        assert taken == (index == len(emitted))
        if taken:
            emitted.extend(ids)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        for entry, (status, epoch, emitted) in zip(self.entries, self.model, strict=True):
            assert (entry.status, entry.epoch, entry.emitted) == (status, epoch, emitted)
        open_ones = sum(status != "finished" for status, _, _ in self.model)
        assert len(self.ledger) == open_ones


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
