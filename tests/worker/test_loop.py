"""The loop with scripted commands and a virtual clock; only waiting moves time."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Abort, Drain, FakeEngineOptions, Shutdown
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Heartbeat,
    Prefilled,
    Rejected,
    RejectReason,
    Tokens,
    WorkerPhase,
)
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from mlx_dp.worker.contract.engine import Drawn, EngineRequest, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.worker_bench import Bench, submit


def test_a_request_is_accepted_generated_and_finished_in_this_order() -> None:
    bench = Bench()
    assert [message.tag for message in bench.run_once(submit(1))] == ["accepted"]
    sent = [message for _ in range(3) for message in bench.run_once()]
    tags = ["prefilled", "tokens", "tokens", "tokens", "finished"]
    assert [message.tag for message in sent] == tags
    assert sent[0] == Prefilled(request_id=1, epoch=1, cached_tokens=0)
    assert [m.chunks[0].index for m in sent if isinstance(m, Tokens)] == [0, 1, 2]
    assert sent[-1] == Finished(request_id=1, epoch=1, reason=FinishReason.LENGTH, num_tokens=3)


def test_one_frame_a_step_carries_all_requests() -> None:
    bench = Bench()
    bench.run_once(submit(1), submit(2))
    *_, tokens = bench.run_once()
    assert isinstance(tokens, Tokens)
    assert [chunk.request_id for chunk in tokens.chunks] == [1, 2]


def test_a_request_beyond_the_slots_is_rejected_and_fits_once_one_is_free() -> None:
    bench = Bench()
    *_, rejected = bench.run_once(submit(1), submit(2, max_tokens=9), submit(3))
    assert isinstance(rejected, Rejected)
    assert rejected.reason is RejectReason.NO_SLOT
    for _ in range(3):
        bench.run_once()
    assert bench.run_once(submit(3))[0] == Accepted(request_id=3, epoch=1, slot=0)


def test_an_abort_frees_its_slot_before_the_next_step() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50), submit(2, max_tokens=50))
    bench.run_once()
    aborted, accepted, tokens = bench.run_once(Abort(request_id=1, epoch=1), submit(3))
    assert aborted == Finished(request_id=1, epoch=1, reason=FinishReason.ABORT, num_tokens=1)
    assert accepted == Accepted(request_id=3, epoch=1, slot=0)
    assert isinstance(tokens, Tokens)
    assert [chunk.request_id for chunk in tokens.chunks] == [2]


def test_a_newer_grant_of_a_request_takes_the_place_of_the_one_that_runs() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50))
    bench.run_once()
    ended, accepted = bench.run_once(replace(submit(1), epoch=3))[:2]
    assert ended == Finished(request_id=1, epoch=1, reason=FinishReason.ABORT, num_tokens=1)
    assert accepted == Accepted(request_id=1, epoch=3, slot=0)


def test_an_earlier_grant_of_a_request_does_not_end_the_one_that_runs() -> None:
    bench = Bench()
    bench.run_once(replace(submit(1, max_tokens=50), epoch=2))
    bench.run_once()
    refused, *_, tokens = bench.run_once(replace(submit(1), epoch=1))
    assert isinstance(refused, Rejected)
    assert (refused.epoch, refused.reason) == (1, RejectReason.INVALID)
    assert isinstance(tokens, Tokens)
    assert tokens.chunks[0].epoch == 2


def test_the_same_grant_once_more_changes_nothing() -> None:
    bench = Bench()
    again = submit(1, max_tokens=50)
    bench.run_once(again)
    bench.run_once()
    assert [message.tag for message in bench.run_once(again)] == ["tokens"]


def test_the_engine_has_let_go_before_the_end_is_reported() -> None:
    sent_before_removal: list[list[str]] = []

    class Watched(FakeEngine):
        def remove(self, slot: int) -> None:
            super().remove(slot)
            sent_before_removal.append([message.tag for message in bench.channel.sent])

    bench = Bench(engine=Watched)
    bench.run_once(submit(1, max_tokens=1))
    assert [message.tag for message in bench.run_once()] == ["prefilled", "tokens", "finished"]
    assert sent_before_removal == [["prefilled", "tokens"]]


def test_an_idle_loop_sleeps_until_the_next_heartbeat_is_due() -> None:
    bench = Bench()
    for _ in range(3):
        bench.loop.run_once()
    assert bench.channel.waits == [1.0, 1.0, 1.0]
    assert [message.tag for message in bench.channel.take()] == ["heartbeat"] * 3


def test_a_busy_loop_never_waits_for_the_controller() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50))
    for _ in range(20):
        bench.run_once()
    assert bench.channel.waits == []


def test_heartbeats_count_steps_and_what_is_held() -> None:
    bench = Bench(options=FakeEngineOptions(decode_tokens_per_s=2.0))
    bench.channel.commands = [submit(1, max_tokens=50, prompt=10)]
    for _ in range(9):
        bench.loop.run_once()
    first, *_, last = bench.channel.sent_of(Heartbeat)
    assert (first.step, first.running, first.prefilling, first.step_tokens) == (0, 1, 1, 10)
    assert (last.running, last.prefilling, last.reserved_tokens) == (1, 0, 59)
    assert 1 < last.step <= 9
    assert (last.used_tokens, last.rss_nbytes) == (10 + last.step - 1, 4_096)
    assert last.phase is WorkerPhase.SERVING


def test_a_step_with_prompt_tokens_is_announced_before_it_begins() -> None:
    told: list[list[int]] = []

    class Watched(FakeEngine):
        def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
            told.append([heartbeat.step_tokens for heartbeat in bench.channel.sent_of(Heartbeat)])
            return super().step(plan)

    bench = Bench(engine=Watched, chunk=64)
    bench.channel.commands = [submit(1, prompt=200)]
    for _ in range(6):
        bench.loop.run_once()
    # The chunk launched before may still run, so both count.
    assert told[:3] == [[64], [64, 128], [64, 128]]
    # Once the prompt is prefilled, an event reports at once that none of it is in flight.
    assert told[-1] == [64, 128, 8]
    tags = [(message.tag, getattr(message, "step_tokens", None)) for message in bench.channel.sent]
    assert tags[-4:] == [("heartbeat", 8), ("prefilled", None), ("tokens", None), ("tokens", None)]


def test_frames_that_could_not_be_read_are_told() -> None:
    bench = Bench()
    bench.channel.malformed_frames = 3
    bench.loop.run_once()
    assert bench.channel.sent_of(Heartbeat)[-1].malformed_frames == 3


def test_a_drain_is_told_at_once_and_finishes_what_runs() -> None:
    bench = Bench()
    bench.run_once(submit(1))
    bench.channel.commands = [Drain(), submit(2)]
    bench.loop.run_once()
    rejected, _, tokens, heartbeat = bench.channel.take()
    assert isinstance(rejected, Rejected)
    assert rejected.reason is RejectReason.DRAINING
    assert isinstance(tokens, Tokens)
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.phase is WorkerPhase.DRAINING
    sent = [message for _ in range(3) for message in bench.run_once()]
    assert sent[-1].tag == "finished"
    # It stays, and reports that it is empty, until the controller shuts it down.
    assert bench.run_once() == []


def test_shutdown_ends_the_loop_in_the_middle_of_everything() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50))
    bench.channel.commands = [Shutdown(), submit(2)]
    assert bench.loop.run() is ExitCode.OK
    assert bench.channel.take() == []


def test_a_failing_step_is_told_and_ends_the_worker() -> None:
    class Broken(FakeEngine):
        def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
            raise RuntimeError("the device is gone")

    bench = Bench(engine=Broken)
    bench.channel.commands = [submit(1)]
    assert bench.loop.run() is ExitCode.INTERNAL
    assert bench.channel.sent_of(Failed) == [
        Failed(kind=FailureKind.INTERNAL, message="RuntimeError: the device is gone")
    ]


def test_an_engine_that_forgets_a_request_is_found_out() -> None:
    class Forgetful(FakeEngine):
        def add(self, slot: int, request: EngineRequest) -> None:
            super().add(slot, replace(request, max_tokens=1))

    bench = Bench(engine=Forgetful)
    bench.channel.commands = [submit(1)]
    assert bench.loop.run() is ExitCode.INTERNAL
    (failed,) = bench.channel.sent_of(Failed)
    assert "1 requests are still running" in failed.message


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_that_cannot_go_on_ends_alone_and_with_the_reason(prefix_cache: bool) -> None:
    class Faulty(FakeEngine):
        def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
            return tuple(
                replace(drawn, fault="the grammar became too costly")
                if self.fails(drawn)
                else drawn
                for drawn in super().step(plan)
            )

        def fails(self, drawn: Drawn) -> bool:
            return drawn.slot == 0 and len(bench.channel.sent_of(Tokens)) == 3

    bench = Bench(engine=Faulty, prefix_cache=prefix_cache)
    bench.channel.commands = [submit(1, max_tokens=50, prompt=8), submit(2, max_tokens=50)]
    while not bench.channel.sent_of(Finished):
        bench.loop.run_once()
    (finished,) = bench.channel.sent_of(Finished)
    assert (finished.request_id, finished.reason) == (1, FinishReason.ERROR)
    assert finished.message == "the grammar became too costly"
    assert finished.num_tokens == 3
    last = bench.channel.sent_of(Tokens)[-1]
    assert [chunk.request_id for chunk in last.chunks] == [2]
    bench.scheduler.check()
    # Its prompt was kept once prefilled, and nothing since.
    assert bench.scheduler.cached_tokens == (7 if prefix_cache else 0)


def test_a_request_that_the_engine_cannot_follow_is_refused_on_arrival() -> None:
    bench = Bench()
    grammar = Grammar(kind=GrammarKind.REGEX, text="a+")
    (rejected,) = bench.run_once(replace(submit(1), grammar=grammar))
    assert isinstance(rejected, Rejected)
    assert rejected.reason is RejectReason.INVALID
    assert "no grammar" in rejected.message
    assert not len(bench.scheduler.requests)


def test_nothing_is_generated_while_the_controller_does_not_read() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50))
    bench.channel.congested = True
    for _ in range(5):
        assert bench.run_once() == []
    assert all(wait > 0.0 for wait in bench.channel.waits)
    bench.channel.congested = False
    *_, tokens = bench.run_once()
    assert isinstance(tokens, Tokens)
    assert tokens.chunks[0].index == 0


def test_commands_are_handled_while_the_controller_does_not_read() -> None:
    bench = Bench()
    bench.run_once(submit(1, max_tokens=50))
    bench.channel.congested = True
    assert [message.tag for message in bench.run_once(Abort(request_id=1, epoch=1))] == ["finished"]
    bench.channel.commands = [Shutdown()]
    assert bench.loop.run_once() is ExitCode.OK


def test_a_long_prompt_does_not_stall_a_running_stream() -> None:
    bench = Bench(options=FakeEngineOptions(decode_tokens_per_s=10.0, prefill_tokens_per_s=1_000.0))
    bench.run_once(submit(1, max_tokens=400))
    for _ in range(5):
        bench.run_once()
    bench.channel.commands = [submit(2, prompt=500, max_tokens=2)]
    arrivals = [bench.time.now]
    while not any(message.request_id == 2 for message in bench.channel.sent_of(Finished)):
        bench.loop.run_once()
        arrivals.append(bench.time.now)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert max(gaps) == pytest.approx(0.15, abs=0.02)
