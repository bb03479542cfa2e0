"""The life cycle of requests, and a machine that walks it at random."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_dp.orchestrator.api import Ended
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry, RequestStatus
from mlx_dp.orchestrator.control.state.request_table import NEXT, RequestTable
from mlx_dp.orchestrator.control.state.transitions import IllegalStepError
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import request_table
from tests.support.control.fake_worker import generation

STOP = Ended(reason=FinishReason.STOP)
TIMES = QueueOptions(queue_timeout_s=5.0, request_timeout_s=60.0)


def opened(
    table: RequestTable, max_tokens: int = 10, *, now: float = 0.0, rank: int | None = None
) -> RequestEntry:
    return table.open(generation(max_tokens=max_tokens, rank=rank), max_tokens, now)


def running(table: RequestTable, max_tokens: int = 10) -> RequestEntry:
    entry = opened(table, max_tokens)
    table.grant(entry, 0, max_tokens, 1.0)
    table.accept(entry)
    return entry


def grant_of(entry: RequestEntry, *, withdrawn: bool = False) -> Grant:
    return Grant(
        request_id=entry.request_id,
        epoch=entry.epoch,
        held_tokens=entry.num_tokens,
        remaining_tokens=1,
        unprefilled_tokens=0,
        since=0.0,
        heartbeats_before=0,
        withdrawn=withdrawn,
    )


def expired(table: RequestTable, now: float) -> list[tuple[int, str]]:
    """Finish all expired requests, and return them."""
    found = []
    while (each := table.expired(now)) is not None:
        entry, ended = each
        table.finish(entry, ended, now)
        found.append((entry.request_id, ended.code))
    table.check()
    return found


def test_every_status_is_in_the_table_and_only_finished_is_final() -> None:
    assert NEXT.keys() == set(RequestStatus)
    assert [status for status, following in NEXT.items() if not following] == ["finished"]


def test_an_illegal_step_names_both_sides_and_changes_nothing() -> None:
    table = request_table()
    entry = running(table)
    table.finish(entry, STOP, 2.0)
    with pytest.raises(IllegalStepError, match="a finished request cannot become granted"):
        table.grant(entry, 0, 10, 2.0)
    with pytest.raises(IllegalStepError, match="a finished request cannot become queued"):
        table.requeue(entry, 2.0)
    table.check()
    assert len(table.queue) == 0


def test_a_request_ends_once_and_is_reported_once() -> None:
    told: list[tuple[int, Ended, float]] = []
    table = RequestTable(
        QueueOptions(), lambda entry, ended, now: told.append((entry.request_id, ended, now))
    )
    entry = running(table)
    table.finish(entry, STOP, 7.0)
    assert table.get(entry.request_id) is None
    with pytest.raises(IllegalStepError):
        table.finish(entry, STOP, 8.0)
    assert told == [(1, STOP, 7.0)]


def test_each_grant_has_its_own_epoch() -> None:
    table = request_table()
    entry = running(table)
    assert entry.epoch == 1
    table.requeue(entry, 1.0)
    assert entry.epoch == 1
    assert entry.dp_rank is None
    table.grant(entry, 1, 10, 2.0)
    assert (entry.epoch, entry.dp_rank, entry.last_dp_rank) == (2, 1, 1)
    assert entry.granted_at == 1.0


def test_duplicates_are_dropped_and_gaps_are_protocol_errors() -> None:
    table = request_table()
    entry = running(table)
    assert table.append(entry, 0, (1, 2), 1.0)
    assert not table.append(entry, 0, (1, 2), 1.0)
    assert not table.append(entry, 1, (2,), 1.0)
    for index in (1, 3):
        with pytest.raises(ProtocolError):
            table.append(entry, index, (2, 3), 1.0)
    assert entry.emitted == [1, 2]


def test_tokens_beyond_the_budget_or_before_acceptance_are_protocol_errors() -> None:
    table = request_table()
    entry = running(table, max_tokens=2)
    with pytest.raises(ProtocolError, match="3 tokens of 2"):
        table.append(entry, 0, (1, 2, 3), 1.0)
    table.requeue(entry, 1.0)
    table.grant(entry, 0, 2, 2.0)
    with pytest.raises(ProtocolError, match="granted"):
        table.append(entry, 0, (1,), 1.0)


def test_an_explicit_rank_holds_until_a_token_is_out() -> None:
    table = request_table()
    entry = opened(table, rank=1)
    table.grant(entry, 1, 10, 0.0)
    table.accept(entry)
    table.requeue(entry, 0.0)
    assert entry.pinned == 1
    table.grant(entry, 1, 10, 0.0)
    table.accept(entry)
    table.append(entry, 0, (1,), 0.0)
    table.requeue(entry, 0.0)
    assert entry.pinned is None
    table.check()


def test_cached_tokens_are_those_of_the_first_owner_that_prefilled_it() -> None:
    table = request_table()
    entry = opened(table)
    firsts = []
    for cached in (2, 3):
        table.grant(entry, 0, 10, 0.0)
        table.accept(entry)
        assert entry.cached_tokens in (None, 2)
        firsts.append(table.note_prefilled(entry, cached))
        table.requeue(entry, 0.0)
    assert entry.cached_tokens == 2
    assert firsts == [True, False]


def test_a_token_resets_the_counts_of_losses() -> None:
    table = request_table()
    entry = running(table)
    entry.losses_without_progress = entry.losses_before_accept = 1
    table.append(entry, len(entry.emitted), (1,), 0.0)
    assert (entry.losses_without_progress, entry.losses_before_accept) == (0, 0)
    table.check()


def test_no_more_is_cached_than_the_prompt_has() -> None:
    table = request_table()
    entry = table.open(generation((1, 2)), 4, 0.0)
    table.grant(entry, 0, 4, 0.0)
    table.accept(entry)
    table.note_prefilled(entry, 9)
    assert entry.cached_tokens == 2


def test_a_grant_leaves_the_queue_and_a_requeued_one_goes_to_its_place_by_age() -> None:
    table = request_table()
    first, second = opened(table), opened(table)
    table.grant(first, 0, 10, 0.0)
    assert table.queue.heads() == [second]
    table.requeue(first, 0.0)
    assert table.queue.heads() == [first]
    table.check()


def test_a_request_can_end_in_every_state() -> None:
    table = request_table()
    queued, granted, accepted = opened(table), opened(table), running(table)
    table.grant(granted, 0, 10, 0.0)
    for entry in (queued, granted, accepted):
        table.finish(entry, STOP, 1.0)
        table.check()
    assert len(table) == len(table.queue) == 0
    assert expired(table, 1e9) == []


def test_the_deadline_of_the_queue_is_for_requests_that_wait() -> None:
    table = request_table(TIMES)
    waiting, granted = opened(table), opened(table)
    table.grant(granted, 0, 10, 1.0)
    assert expired(table, 4.9) == []
    assert expired(table, 5.0) == [(waiting.request_id, "queue_timeout")]
    assert expired(table, 59.9) == []
    assert expired(table, 60.0) == [(granted.request_id, "request_timeout")]


def test_a_request_that_lost_its_owner_before_any_token_waits_the_whole_time_again() -> None:
    table = request_table(TIMES)
    entry = opened(table)
    table.grant(entry, 0, 10, 4.0)
    table.requeue(entry, 30.0)
    assert expired(table, 34.9) == []
    assert expired(table, 35.0) == [(entry.request_id, "queue_timeout")]


def test_a_request_with_tokens_waits_as_long_as_it_may_live() -> None:
    table = request_table(TIMES)
    entry = running(table)
    table.append(entry, 0, (1,), 2.0)
    table.requeue(entry, 3.0)
    assert expired(table, 59.0) == []
    assert expired(table, 60.0) == [(entry.request_id, "request_timeout")]


def test_asking_what_has_expired_changes_nothing() -> None:
    table = request_table(TIMES)
    entry = opened(table)
    for _ in range(2):
        found = table.expired(5.0)
        assert found is not None
        assert found[0] is entry
        assert found[1].message == (
            "the queue time-out of 5 s has passed, with 1 requests in the queue"
        )
        table.check()


def test_a_grant_has_its_request_until_that_ends_or_is_withdrawn() -> None:
    table = request_table()
    entry = running(table)
    assert table.current(grant_of(entry)) is entry
    assert table.current(grant_of(entry, withdrawn=True)) is None
    grant = grant_of(entry)
    table.finish(entry, STOP, 0.0)
    assert table.current(grant) is None


def test_a_request_that_moved_on_while_its_grant_lives_is_an_internal_error() -> None:
    table = request_table()
    entry = running(table)
    grant = grant_of(entry)
    table.requeue(entry, 0.0)
    table.grant(entry, 1, 10, 0.0)
    with pytest.raises(AssertionError):
        table.current(grant)


class RequestTableMachine(RuleBasedStateMachine):
    """Steps of all kinds, legal or not, against a model that is a dictionary of words."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.finished: list[int] = []
        self.table = RequestTable(
            TIMES, lambda entry, ended, now: self.finished.append(entry.request_id)
        )
        self.entries: list[RequestEntry] = []
        self.model: list[tuple[str, int, list[int]]] = []

    def attempt(self, number: int, wanted: RequestStatus, act: Callable[[], None]) -> None:
        status, epoch, emitted = self.model[number]
        if wanted in NEXT[RequestStatus(status)]:
            act()
            epoch += wanted is RequestStatus.GRANTED
            self.model[number] = (wanted, epoch, emitted)
            return
        with pytest.raises(IllegalStepError):
            act()

    @rule(rank=st.one_of(st.none(), st.integers(0, 1)))
    def open(self, rank: int | None) -> None:
        wanted = generation(max_tokens=None, rank=rank)
        self.entries.append(self.table.open(wanted, None, self.now))
        self.model.append(("queued", 0, []))

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.entries) - 1))
        entry = self.entries[number]
        wanted = data.draw(st.sampled_from(RequestStatus))
        steps = {
            RequestStatus.QUEUED: lambda: self.table.requeue(entry, self.now),
            RequestStatus.GRANTED: lambda: self.table.grant(entry, 0, 10**6, self.now),
            RequestStatus.RUNNING: lambda: self.table.accept(entry),
            RequestStatus.FINISHED: lambda: self.table.finish(entry, STOP, self.now),
        }
        self.attempt(number, wanted, steps[wanted])

    @rule(passed_s=st.floats(0.0, 70.0))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        while (found := self.table.expired(self.now)) is not None:
            entry, ended = found
            number = self.entries.index(entry)
            status, epoch, emitted = self.model[number]
            assert ended.code == "request_timeout" or (status == "queued" and not emitted)
            self.table.finish(entry, ended, self.now)
            self.model[number] = ("finished", epoch, emitted)
        assert all(self.now - entry.queued_at < TIMES.request_timeout_s for entry in self.table)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), index=st.integers(0, 8), ids=st.lists(st.integers(0, 9), min_size=1))
    def append(self, data: st.DataObject, index: int, ids: list[int]) -> None:
        number = data.draw(st.integers(0, len(self.entries) - 1))
        status, _, emitted = self.model[number]
        try:
            taken = self.table.append(self.entries[number], index, tuple(ids), 0.0)
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
        self.table.check()
        for entry, (status, epoch, emitted) in zip(self.entries, self.model, strict=True):
            assert (entry.status, entry.epoch, entry.emitted) == (status, epoch, emitted)
        words = [status for status, _, _ in self.model]
        assert len(self.table) == len(words) - words.count("finished")
        assert len(self.table.queue) == words.count("queued")
        assert len(self.finished) == len(set(self.finished)) == words.count("finished")


TestRequestTableMachine = RequestTableMachine.TestCase
TestRequestTableMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
