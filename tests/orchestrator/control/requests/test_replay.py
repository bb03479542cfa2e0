"""Outcomes of a request whose owner is lost."""

import pytest

from mlx_dp.orchestrator.api import Ended
from mlx_dp.orchestrator.control.requests.replay import count_loss, find_sole_suspect
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.owner import Owner, terms
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.workers.actions import Loss
from mlx_dp.orchestrator.worker_states import LossKind
from mlx_dp.proto.messages.events import FinishReason
from tests.support.control.control_world import request_table
from tests.support.control.fake_worker import generation, ready


class Life:
    """One request and its grant on the owner that is about to be lost."""

    def __init__(self, max_tokens: int = 9, stop: tuple[int, ...] = ()) -> None:
        self.table = request_table()
        self.entry: RequestEntry = self.table.open(
            generation(max_tokens=max_tokens, stop=stop), max_tokens, 0.0
        )
        self.owner: Owner = RankTable().add(0, "w0-0", ready(), 0.0)

    def grant(self, *emitted: int, accepted: bool = True) -> Grant:
        granted = terms(self.owner.limits, self.entry)
        assert granted is not None
        self.table.grant(self.entry, 0, granted.max_tokens, 0.0)
        grant = self.owner.grant(self.entry, granted, 0.0)
        if accepted:
            self.owner.note_accepted(grant)
            self.table.accept(self.entry)
        if emitted:
            self.table.append(self.entry, len(self.entry.emitted), emitted, 0.0)
            self.owner.note_tokens(grant, len(emitted))
        return grant

    def lose(
        self, grant: Grant, *, kind: LossKind = LossKind.EXIT, culprit: bool = True
    ) -> Ended | None:
        self.owner.release(grant)
        loss = Loss(kind=kind, detail="gone")
        ended = count_loss(self.entry, grant, loss, culprit=culprit, max_attempts=3)
        if ended is None:
            self.table.requeue(self.entry, 0.0)
        return ended


def codes(life: Life, *rounds: tuple[int, ...], **grant: bool) -> list[str | None]:
    ends = [life.lose(life.grant(*emitted, **grant)) for emitted in rounds]
    return [None if end is None else end.code for end in ends]


def test_progress_before_each_loss_uses_up_no_attempt() -> None:
    life = Life(max_tokens=99)
    ends = [life.lose(life.grant(1), kind=LossKind.HUNG, culprit=False) for _ in range(20)]
    assert ends == [None] * 20


def test_a_loss_without_progress_begins_to_count_anew_after_a_token() -> None:
    life = Life(max_tokens=99)

    def lose(*emitted: int) -> Ended | None:
        return life.lose(life.grant(*emitted), kind=LossKind.HUNG, culprit=False)

    ends = [lose(), lose(), lose(1), lose(), lose(), lose()]
    assert [None if end is None else end.code for end in ends] == [None] * 5 + ["worker_lost"]


def test_grants_that_never_arrived_are_forgotten_after_a_token() -> None:
    life = Life(max_tokens=99)
    assert codes(life, *[()] * 4, accepted=False) == [None] * 4
    assert codes(life, (1,)) == [None]
    assert codes(life, *[()] * 4, accepted=False) == [None] * 4


def test_a_request_at_every_death_is_not_replayed_for_ever() -> None:
    ends = codes(Life(max_tokens=99), (1,), (2,), (3,), (4,), (5,))
    assert ends == [None] * 4 + ["request_crashed_worker"]


@pytest.mark.parametrize(
    ("suspect", "accepted", "emitted", "tried"),
    [
        (True, True, (), True),
        (True, True, (1,), False),
        (True, False, (), False),
        (False, True, (), False),
    ],
)
def test_a_suspect_is_on_trial_until_it_has_yielded_something(
    suspect: bool, accepted: bool, emitted: tuple[int, ...], tried: bool
) -> None:
    life = Life()
    life.entry.crashes = int(suspect)
    bystander = Grant(
        request_id=9,
        epoch=1,
        held_tokens=1,
        remaining_tokens=1,
        unprefilled_tokens=1,
        since=0.0,
        heartbeats_before=0,
    )
    grant = life.grant(*emitted, accepted=accepted)
    assert find_sole_suspect((bystander, grant)) is (grant if tried else None)


def test_no_progress_at_the_second_death_is_poison() -> None:
    assert codes(Life(), (), ()) == [None, "request_crashed_worker"]
    assert codes(Life(), (1,), ()) == [None, "request_crashed_worker"]


def test_progress_at_the_second_death_is_no_poison() -> None:
    assert codes(Life(), (), (1,)) == [None, None]


def test_grants_that_never_arrived_are_bounded_too() -> None:
    life = Life()
    assert codes(life, *[()] * 4, accepted=False) == [None] * 4
    assert life.entry.losses_without_progress == life.entry.crashes == 0
    assert codes(life, (), accepted=False) == ["worker_lost"]


def test_grants_that_never_arrived_leave_a_request_all_of_its_attempts() -> None:
    life = Life()
    assert codes(life, *[()] * 4, accepted=False) == [None] * 4
    ends = [life.lose(life.grant(), kind=LossKind.HUNG, culprit=False) for _ in range(3)]
    assert [None if end is None else end.code for end in ends] == [None, None, "worker_lost"]


@pytest.mark.parametrize("kind", [LossKind.SIBLING, LossKind.RESTART])
@pytest.mark.parametrize("accepted", [False, True])
def test_a_loss_without_blame_counts_for_nothing_however_often(
    kind: LossKind, accepted: bool
) -> None:
    life = Life()
    for _ in range(9):
        grant = life.grant(accepted=accepted)
        assert life.lose(grant, kind=kind, culprit=False) is None
    assert (
        life.entry.crashes,
        life.entry.losses_without_progress,
        life.entry.losses_before_accept,
    ) == (0, 0, 0)


def test_a_hang_of_a_group_is_an_attempt_of_all_and_poison_to_none() -> None:
    life = Life()
    ends = [life.lose(life.grant(), kind=LossKind.HUNG, culprit=False) for _ in range(3)]
    assert [None if end is None else end.code for end in ends] == [None, None, "worker_lost"]
    assert life.entry.crashes == 0


@pytest.mark.parametrize(("emitted", "reason"), [((1, 2, 3), "length"), ((1, 7), "stop")])
def test_a_complete_answer_ends_as_it_would_have(emitted: tuple[int, ...], reason: str) -> None:
    life = Life(max_tokens=3, stop=(7,))
    assert life.lose(life.grant(*emitted)) == Ended(reason=FinishReason(reason))
