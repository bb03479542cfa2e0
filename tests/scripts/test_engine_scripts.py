"""Conclusions that the engine's benchmark and soak draw from their observations."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Finished,
    FinishReason,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
    Up,
)

pytestmark = pytest.mark.mlx


class WordyWorker:
    """Sends scripted events at each loop run, and records its commands."""

    def __init__(self, said: tuple[list[Up], ...], slots: int) -> None:
        self._said = iter(said)
        self.told: list[Any] = []
        self.capacity = SimpleNamespace(request_slots=slots)
        self.engine = SimpleNamespace(busy=False)

    def send(self, command: Any) -> None:
        self.told.append(command)

    def run_once(self) -> list[Up]:
        return next(self._said)


@pytest.fixture
def control(load):
    def make(*said: list[Up], slots: int = 1):
        request = load("soaking.requests").SoakRequest(
            prompt_ids=(1, 2, 3),
            max_tokens=3,
            stop_token_ids=(9,),
            params=load("benchmarks.engine.worker").GREEDY,
            cache_salt="",
            cancel_after=None,
        )
        maker = SimpleNamespace(draw=lambda: request, ended=lambda *_: None)
        return load("soaking.control").SoakControl(WordyWorker(said, slots), maker)

    return make


def accepted(epoch: int = 1) -> Accepted:
    return Accepted(request_id=1, epoch=epoch, slot=0)


def prefilled(epoch: int = 1, cached: int = 0) -> Prefilled:
    return Prefilled(request_id=1, epoch=epoch, cached_tokens=cached)


def tokens(*ids: int, index: int = 0, epoch: int = 1) -> Tokens:
    return Tokens(chunks=(TokenChunk(request_id=1, epoch=epoch, index=index, ids=ids),))


def finished(count: int, reason: FinishReason = FinishReason.LENGTH, epoch: int = 1) -> Finished:
    return Finished(request_id=1, epoch=epoch, reason=reason, num_tokens=count)


def preempted(count: int) -> Preempted:
    return Preempted(request_id=1, epoch=1, num_tokens=count)


def rejected(reason: RejectReason) -> Rejected:
    return Rejected(request_id=1, epoch=1, reason=reason, message="")


def test_a_preempted_request_goes_on_behind_what_it_had(control):
    soak = control(
        [accepted(), prefilled(), tokens(5, 6)],
        [preempted(2)],
        [accepted(2), prefilled(2, cached=4), tokens(7, index=2, epoch=2), finished(3, epoch=2)],
    )
    soak.run_once(more=True)
    soak.run_once(more=True)
    soak.run_once(more=False)
    again = soak._worker.told[-1]
    assert isinstance(again, Submit)
    assert (again.epoch, again.output_ids) == (2, (5, 6))
    assert [job.answer for job in soak.finished] == [[5, 6, 7]]
    counters = soak.counters
    assert (counters.preempted, counters.replayed, counters.cached_tokens) == (1, 1, 4)
    assert soak.idle


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([prefilled(), tokens(5, index=1)], id="a token is missing"),
        pytest.param([prefilled(), tokens(5, epoch=2)], id="another epoch"),
        pytest.param([tokens(5)], id="tokens before Prefilled"),
        pytest.param([prefilled(), prefilled()], id="Prefilled twice"),
        pytest.param([prefilled(cached=3)], id="all cached, nothing to draw from"),
        pytest.param([prefilled(), tokens(5, 6, 7, 8)], id="more than its budget"),
        pytest.param([prefilled(), tokens(5), finished(1)], id="ended before its budget"),
        pytest.param([prefilled(), tokens(5, 6, 7), finished(2)], id="a token more than it counts"),
        pytest.param([preempted(1)], id="a token less than it counts"),
        pytest.param([accepted()], id="accepted twice"),
        pytest.param(
            [prefilled(), tokens(5), finished(1, FinishReason.STOP)], id="stopped at no stop token"
        ),
        pytest.param([finished(0, FinishReason.ABORT)], id="aborted unasked"),
    ],
)
def test_impossible_events_of_a_worker_are_refused(control, said):
    with pytest.raises(AssertionError):
        control([accepted(), *said]).run_once(more=True)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(accepted(2), id="accepted in another epoch"),
        pytest.param(prefilled(), id="Prefilled before Accepted"),
        pytest.param(preempted(0), id="preempted before Accepted"),
        pytest.param(rejected(RejectReason.NO_TOKENS), id="refused although nothing runs"),
    ],
)
def test_an_impossible_first_event_of_a_request_is_refused(control, said):
    with pytest.raises(AssertionError):
        control([said]).run_once(more=True)


def test_only_a_lack_of_memory_may_refuse_a_slot_that_is_free(control):
    with pytest.raises(AssertionError):
        control([rejected(RejectReason.NO_SLOT)], slots=2).run_once(more=True)
    soak = control([rejected(RejectReason.NO_TOKENS)], [], slots=2)
    soak.run_once(more=True)
    soak.run_once(more=True)
    assert [command.request_id for command in soak._worker.told] == [1, 2], "it waits for an end"


def test_a_worker_without_progress_is_found(control, load, monkeypatch):
    monkeypatch.setattr(load("soaking.control"), "PATIENCE_TURNS", 3)
    soak = control(*[[]] * 4)
    for _ in range(3):
        soak.run_once(more=True)
    with pytest.raises(RuntimeError, match="no request progresses"):
        soak.run_once(more=True)


def test_the_same_seed_draws_the_same_requests_and_all_kinds_of_them(load):
    makers = [load("soaking.requests").RequestMaker(3, 500) for _ in range(2)]
    drawn = [[maker.draw() for _ in range(400)] for maker in makers]
    assert drawn[0] == drawn[1]
    assert {request.cache_salt for request in drawn[0]} == {"", "tenant-a", "tenant-b"}
    assert {request.greedy for request in drawn[0]} == {True, False}
    assert any(request.cancel_after is not None for request in drawn[0])
    assert any(request.stop_token_ids for request in drawn[0])
    prompts = [request.prompt_ids for request in drawn[0]]
    assert len(set(prompts)) < len(prompts)
    assert len({prompt[:20] for prompt in prompts if len(prompt) > 30}) < len(prompts) / 2


@pytest.mark.parametrize("grown", ["rss_nbytes", "active_nbytes", "cached_nbytes"])
def test_memory_may_grow_by_a_twentieth_and_not_more(load, grown):
    memory = load("soaking.memory")
    sizes = {"rss_nbytes": 1000, "active_nbytes": 400, "cached_nbytes": 400, "held_nbytes": 0}
    first = memory.MemorySample(requests=100, **sizes)
    assert memory.growth(first, memory.MemorySample(requests=500, **sizes)) == []
    more = memory.MemorySample(requests=500, **{**sizes, grown: sizes[grown] + 51})
    assert memory.growth(first, more)
    counted = memory.MemorySample(
        requests=500, **{**sizes, grown: sizes[grown] + 51, "held_nbytes": 51}
    )
    assert memory.growth(first, counted) == []


@pytest.mark.parametrize(
    ("budget", "running", "faults"), [(100, 2, 1), (100, 1, 0), (102, 2, 0), (None, 2, 0)]
)
def test_only_a_request_that_runs_alone_may_exceed_the_budget(load, budget, running, faults):
    watch = load("soaking.memory").BudgetWatch(budget)
    watch.look(106, running=running)
    watch.look(3, running=2)
    assert len(watch.faults()) == faults


@pytest.mark.parametrize(
    ("bounds", "ratio", "verdict"),
    [
        ({"at_least": 0.97}, 0.97, ">= 0.97: met"),
        ({"at_least": 0.97}, 0.96, ">= 0.97: MISSED"),
        ({"at_most": 0.15}, 0.15, "<= 0.15: met"),
        ({"at_most": 0.15}, 0.16, "<= 0.15: MISSED"),
    ],
)
def test_a_ratio_is_held_against_its_goal(load, bounds, ratio, verdict):
    assert load("benchmarks.results.cases").Goal(**bounds).judge(ratio) == verdict


def test_no_two_measured_prompts_begin_alike(load):
    pair = load("benchmarks.engine.side").Pair(
        ours=None, peer=None, vocab_size=5000, rounds=1, seed=1
    )
    names = [f"{kind} {index}" for kind in ("a", "b") for index in range(40)]
    assert len({tuple(pair.prompt(name, 4)) for name in names}) == len(names)
    assert pair.prompt("a 1", 4) == pair.prompt("a 1", 4)
