"""The controller as a whole, against fake workers and a clock that only tests move."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.api import (
    Ended,
    OverloadedError,
    RefusedError,
    ServiceStatus,
    WorkerStatus,
)
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service_counters import RequestTimings
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.fields import MAX_CACHE_SALT_CHARS
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    FailureKind,
    Finished,
    FinishReason,
    Hello,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
    Up,
)
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import Running, expected, generation, ready


def submit(world: World, *args, **kwargs) -> Reader:
    return Reader(world.core.submit(generation(*args, **kwargs)))


def ended(reader: Reader) -> Ended:
    reader.read()
    assert reader.ended is not None, "it has not ended"
    return reader.ended


def test_a_request_is_granted_streamed_and_finished() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=3)
    world.run_workers(3)
    assert ended(reader) == Ended(reason=FinishReason.LENGTH)
    assert reader.ids == expected(generation(), 3)
    assert [grant.dp_rank for grant in reader.grants] == [0]
    assert world.core.counters.requests_ok == 1
    assert world.core.counters.generated_by_owner.total() == 3


def test_workers_load_one_at_a_time() -> None:
    world = World(serve_options(3))
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    assert [worker.index for worker in world.workers] == [0]
    world.workers[0].become_ready()
    world.settle()
    assert [worker.index for worker in world.workers] == [0, 1]


def test_nothing_is_taken_before_a_worker_is_ready() -> None:
    world = World()
    world.core.begin()
    with pytest.raises(OverloadedError) as refused:
        submit(world)
    assert refused.value.status == 503
    assert refused.value.retry_after_s > 0
    assert world.core.counters.requests_refused["starting"] == 1


def test_a_request_waits_for_room_and_goes_where_it_frees_first() -> None:
    world = World().bring_up()
    readers = [submit(world, (1,), 9 if n == 2 else 20) for n in range(4)]
    waiting = submit(world, (1,), 1)
    assert len(world.core.table.queue) == 1
    world.run_workers(9)
    assert readers[2].read().ended is not None
    assert len(world.core.table.queue) == 0
    world.run_workers()
    assert ended(waiting).reason is FinishReason.LENGTH
    assert waiting.grants[0].dp_rank == readers[2].grants[0].dp_rank


def test_a_full_queue_is_a_429() -> None:
    world = World(serve_options(1, queue=QueueOptions(max_queued_requests=2))).bring_up()
    for _ in range(4):
        submit(world)
    with pytest.raises(OverloadedError) as refused:
        submit(world)
    assert refused.value.status == 429


def test_an_explicit_rank_is_obeyed_and_refused_when_it_is_out_of_range() -> None:
    world = World().bring_up()
    reader = submit(world, rank=1)
    world.run_workers(4)
    assert reader.read().grants[0].dp_rank == 1
    assert reader.grants[0].reason == "explicit_rank"
    for rank in (-1, 2):
        with pytest.raises(RefusedError) as refused:
            submit(world, rank=rank)
        assert refused.value.param == "routed_dp_rank"


def test_an_explicit_rank_that_is_not_ready_is_a_503_and_never_moved() -> None:
    world = World().bring_up()
    world.worker(1).die(-9)
    with pytest.raises(OverloadedError) as refused:
        submit(world, rank=1)
    assert refused.value.status == 503
    submit(world, rank=0)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    world = World()
    world.readies = {0: ready(pool=50), 1: ready(pool=20)}
    world.bring_up()
    with pytest.raises(RefusedError, match="context length is 51 tokens") as refused:
        submit(world, (1,) * 51, 20)
    assert refused.value.param == "prompt"
    with pytest.raises(RefusedError, match="20 KV tokens"):
        submit(world, (1,) * 30, 5, rank=1)
    with pytest.raises(RefusedError) as too_long:
        submit(world, (1,) * 60, None)
    assert too_long.value.code == "context_length_exceeded"


def test_a_request_goes_only_where_it_fits() -> None:
    world = World()
    world.readies = {0: ready(pool=20), 1: ready(pool=500)}
    world.bring_up()
    reader = submit(world, (1,) * 30, 5)
    world.run_workers(5)
    assert reader.read().grants[0].dp_rank == 1


@pytest.mark.parametrize("bad", [-1, 97, 2**31])
def test_token_ids_outside_of_the_vocabulary_never_reach_a_worker(bad: int) -> None:
    world = World().bring_up()
    with pytest.raises(RefusedError, match="does not exist"):
        submit(world, (1, bad))
    assert not world.worker(0).commands


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_stop_token_ids_that_no_message_may_have_never_reach_a_worker(bad: int) -> None:
    world = World().bring_up()
    with pytest.raises(RefusedError, match="does not exist"):
        submit(world, stop=(bad,))
    assert not world.worker(0).commands


def test_cancelling_in_the_queue_sends_nothing() -> None:
    world = World(serve_options(1)).bring_up()
    readers = [submit(world) for _ in range(3)]
    before = len(world.worker(0).commands)
    readers[2].answer.cancel()
    assert ended(readers[2]).reason is FinishReason.ABORT
    assert len(world.worker(0).commands) == before
    readers[2].answer.cancel()
    assert world.core.counters.requests_aborted == 1


def test_the_slot_of_a_cancelled_request_is_free_only_once_the_owner_says_so() -> None:
    world = World(serve_options(1)).bring_up()
    first, _, waiting = (submit(world, max_tokens=50) for _ in range(3))
    world.run_workers(2)
    first.answer.cancel()
    assert ended(first).reason is FinishReason.ABORT
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert owner.free_slots == 0
    world.run_workers()
    world.run_workers()
    assert waiting.read().grants
    assert owner.free_slots == 0


def test_cancelling_before_it_is_accepted_still_frees_the_slot() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world)
    reader.answer.cancel()
    world.run_workers()
    world.run_workers()
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert not owner.grants
    assert ended(reader).reason is FinishReason.ABORT
    assert world.core.counters.prompt_by_owner.total() == 0


def test_an_abort_that_a_congested_owner_did_not_take_is_repeated() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, max_tokens=50)
    world.run_workers()
    identity = world.worker(0).identity
    world.congested.add(identity)
    reader.answer.cancel()
    world.run_workers()
    assert world.worker(0).running
    world.congested.clear()
    world.pass_time(0.1)
    world.run_workers(2)
    assert not world.worker(0).running


def test_a_lost_worker_costs_no_token_and_repeats_none() -> None:
    world = World().bring_up()
    readers = [submit(world, (n,), 10, seed=n) for n in range(4)]
    world.run_workers(3)
    world.worker(0).kill()
    world.pass_time(0.1)
    world.run_workers(20)
    for n, reader in enumerate(readers):
        assert ended(reader).reason is FinishReason.LENGTH
        assert reader.ids == expected(generation((n,), seed=n), 10)
    assert world.core.counters.requests_replayed == 2
    assert world.core.counters.worker_deaths == 1


def test_a_dead_process_has_no_memory() -> None:
    world = World().bring_up()
    world.pass_time(0.1)
    assert [owner.rss_nbytes for owner in world.core.views.owners()] == [1, 1]
    world.worker(0).die(-9)
    world.pass_time(0.1)
    assert [owner.rss_nbytes for owner in world.core.views.owners()] == [0, 1]


def test_the_last_messages_of_a_dead_process_still_count() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, max_tokens=2)
    world.worker(0).run_once()
    world.worker(0).run_once()
    world.worker(0).kill()
    world.pass_time(0.1)
    assert ended(reader).reason is FinishReason.LENGTH


def test_messages_that_come_in_just_after_the_exit_still_count() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, max_tokens=1)
    worker = world.worker(0)
    worker.run_once()
    late = list(world.arrived)
    world.arrived.clear()
    worker.die(-9)
    world.core.settle_exits()
    world.arrived.extend(late)
    world.clock.now += 0.03
    world.core.settle_exits()
    assert ended(reader).reason is FinishReason.LENGTH
    assert world.core.supervisor.workers[0].status is WorkerStatus.LOST


def test_an_answer_that_was_complete_is_not_generated_again() -> None:
    world = World().bring_up()
    whole = expected(generation(), 3)
    by_length = submit(world, max_tokens=2)
    by_stop = submit(world, max_tokens=9, stop=(whole[1],))
    for worker in world.alive():
        worker.run_once()
        worker.run_once()
    # The Finished events are lost with the workers.
    world.arrived = type(world.arrived)(
        (identity, event) for identity, event in world.arrived if event.tag != "finished"
    )
    for worker in world.alive():
        worker.kill()
    world.pass_time(0.1)
    assert ended(by_length).reason is FinishReason.LENGTH
    assert ended(by_stop).reason is FinishReason.STOP
    assert world.core.counters.requests_replayed == 0


def test_a_request_that_crashes_its_worker_twice_ends_as_poison() -> None:
    world = World().bring_up()
    poison = submit(world)
    for _ in range(2):
        world.settle()
        owner = poison.read().grants[-1].dp_rank
        world.worker(owner).kill()
        world.pass_time(0.1)
    assert ended(poison).code == "request_crashed_worker"
    assert world.core.counters.worker_deaths == 2


def test_a_request_that_flees_to_the_next_victim_of_an_accident_is_no_poison() -> None:
    world = World(serve_options(3)).bring_up()
    reader = submit(world)
    world.settle()
    first = reader.read().grants[-1].dp_rank
    world.worker(first).kill()
    world.pass_time(0.05)
    world.settle()
    second = reader.read().grants[-1].dp_rank
    (third,) = {0, 1, 2} - {first, second}
    world.worker(third).kill()
    world.worker(second).kill()
    world.recover()
    world.run_workers(30)
    assert ended(reader).reason is FinishReason.LENGTH
    assert reader.ids == expected(generation(), len(reader.ids))
    assert world.core.counters.worker_deaths == 3


def test_a_request_is_put_beside_poison_only_once() -> None:
    world = World()
    world.readies = {0: ready(slots=4), 1: ready(slots=4)}
    world.bring_up()
    poison, _elsewhere, bystander = (submit(world, (n,), 4, seed=n) for n in range(3))
    world.settle()
    first = poison.read().grants[-1].dp_rank
    assert bystander.read().grants[-1].dp_rank == first
    world.worker(first).kill()
    world.pass_time(0.1)
    world.settle()
    second = poison.read().grants[-1].dp_rank
    # One owner is left, which tries one of the two at a time.
    assert len(bystander.read().grants) == 1
    world.worker(second).kill()
    world.recover()
    world.run_workers(20)
    assert ended(poison).code == "request_crashed_worker"
    assert ended(bystander).reason is FinishReason.LENGTH
    assert bystander.ids == expected(generation((2,), seed=2), 4)


def test_a_request_that_makes_progress_outlives_more_workers_than_it_has_attempts() -> None:
    world = World(serve_options(1)).bring_up()
    reader = submit(world, max_tokens=50)
    for attempt in range(5):
        world.run_workers(2)
        assert reader.read().ended is None, attempt
        world.worker(0).kill()
        world.recover()
    end = ended(reader)
    assert (end.code, end.status) == ("request_crashed_worker", 500)
    assert reader.ids == expected(generation(), 10)


def test_one_poison_after_the_other_fails_no_request_beside_it() -> None:
    world = World()
    world.readies = {0: ready(slots=4), 1: ready(slots=4)}
    world.bring_up()
    bystanders = [submit(world, (n,), 40, seed=n) for n in (2, 3)]
    for _ in range(4):
        world.run_workers(2)
        poison = submit(world, (9,), 4, seed=9)
        for death in range(2):
            world.settle()
            while len(poison.read().grants) <= death:
                # Requests that ran beside it are tried before it.
                world.run_workers(1)
            world.settle()
            world.worker(poison.read().grants[-1].dp_rank).kill()
            world.pass_time(0.1)
        world.recover()
        assert ended(poison).code == "request_crashed_worker"
    world.run_workers(40)
    assert [ended(each).reason for each in bystanders] == [FinishReason.LENGTH] * 2


def test_a_grant_lost_before_it_was_accepted_is_no_attempt() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=2)
    losses = world.limits.max_attempts + 1
    for loss in range(losses):
        while len(reader.read().grants) == loss:
            assert reader.ended is None, loss
            world.pass_time(0.1)
            world.greet()
            for worker in world.alive():
                # A worker that serves but never reads its grants.
                if not worker.serving:
                    worker.receive()
        world.worker(reader.grants[-1].dp_rank).kill()
    world.recover(4.0)
    world.run_workers(2)
    assert ended(reader).reason is FinishReason.LENGTH
    assert world.core.counters.worker_deaths == losses
    assert world.core.counters.requests_replayed == 0


def test_events_of_a_replaced_worker_change_nothing() -> None:
    world = World(limits=None).bring_up()
    reader = submit(world, max_tokens=6)
    world.run_workers(2)
    old = world.worker(0)
    old.stopped = True
    world.deaf_to_abort = True
    for _ in range(30):
        world.pass_time(0.5)
        world.run_workers(1)
    assert ended(reader).reason is FinishReason.LENGTH
    assert reader.ids == expected(generation(), 6)
    assert [grant.dp_rank for grant in reader.grants] == [0, 1]
    old.alive = True
    old.stopped = False
    before = world.unknown_frames
    old.run_once()
    world.core.on_arrival()
    assert world.unknown_frames > before


def test_a_gap_in_the_tokens_replaces_the_worker() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=4)
    world.run_workers()
    chunk = TokenChunk(request_id=1, epoch=1, index=3, ids=(5,))
    world.worker(0).send_event(Tokens(chunks=(chunk,)))
    world.core.on_arrival()
    assert world.core.counters.protocol_errors == 1
    assert world.core.supervisor.workers[0].status is WorkerStatus.LOST
    world.run_workers(5)
    assert reader.read().ids == expected(generation(), 4)


def test_repeated_tokens_are_dropped() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=4)
    world.run_workers(2)
    first = expected(generation(), 1)[0]
    chunk = TokenChunk(request_id=1, epoch=1, index=0, ids=(first,))
    world.worker(0).send_event(Tokens(chunks=(chunk,)))
    world.run_workers(2)
    assert reader.read().ids == expected(generation(), 4)
    assert world.core.counters.duplicate_chunks == 1
    assert world.core.counters.stale_events == world.core.counters.protocol_errors == 0


def test_events_of_another_epoch_are_stale() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=4)
    world.run_workers(2)
    worker = world.worker(0)
    worker.send_event(Tokens(chunks=(TokenChunk(request_id=1, epoch=9, index=2, ids=(5,)),)))
    worker.send_event(Accepted(request_id=77, epoch=1, slot=0))
    world.run_workers(2)
    assert reader.read().ids == expected(generation(), 4)
    assert world.core.counters.stale_events == 2


def test_a_malformed_message_replaces_the_worker() -> None:
    world = World().bring_up()
    world.arrived.append((world.worker(1).identity, ProtocolError("malformed")))
    # Later messages of the same batch are not read either.
    world.worker(1).send_event(Tokens(chunks=()))
    world.core.on_arrival()
    assert world.core.counters.protocol_errors == world.core.counters.malformed_frames == 1
    assert world.worker(1).signals == ["kill"]
    world.recover()
    assert world.core.supervisor.workers[1].status is WorkerStatus.READY
    assert world.core.supervisor.workers[1].restarts == 1


def test_a_worker_that_steps_no_more_is_hung_and_replaced() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=50)
    world.run_workers(2)
    world.deaf_to_abort = True
    world.pass_time(9.0)
    assert world.workers[0].signals == []
    world.pass_time(1.5)
    assert world.workers[0].signals == ["abort"]
    world.pass_time(1.2)
    assert world.workers[0].signals == ["abort", "kill"]
    world.run_workers()
    assert reader.read().grants[-1].dp_rank == 1


def test_a_worker_in_a_long_prefill_is_given_the_time_that_its_tokens_take() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=50)
    world.run_workers(2)
    world.worker(0).send_heartbeat(step_tokens=512)
    world.worker(0).stopped = True
    world.pass_time(60.0)
    assert world.workers[0].signals == []
    world.pass_time(2.0)
    assert world.workers[0].signals == ["abort"]
    world.run_workers()
    assert reader.read().grants[-1].dp_rank == 1


@pytest.mark.parametrize(("idle_s", "lost"), [(5.0, True), (61.0, False)])
def test_only_after_an_idle_minute_may_a_first_step_take_long(idle_s: float, lost: bool) -> None:
    world = World().bring_up()
    submit(world, max_tokens=2)
    world.run_workers(4)
    for _ in range(round(idle_s)):
        world.pass_time(1.0)
        world.run_workers()
    reader = submit(world, max_tokens=50)
    owner = next(worker for worker in world.workers if worker.commands)
    owner.receive()
    owner.send_heartbeat(step_tokens=20, prefill_token_s=0.001)
    owner.stopped = True
    world.pass_time(30.0)
    assert (owner.signals != []) is lost
    if not lost:
        owner.stopped = False
        world.run_workers(2)
        assert reader.read().ids


def overdue(world: World) -> list[bool]:
    return [state.overdue for state in world.core.views.owners()]


def test_a_worker_that_stops_at_its_first_tokens_is_overdue_soon_and_lost_in_time() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=50)
    worker = world.worker(0)
    worker.send_heartbeat(step_tokens=1024)
    world.run_workers(2)
    worker.send_heartbeat(prefill_token_s=0.002)
    world.run_workers(2)
    worker.stopped = True
    world.pass_time(1.9)
    assert overdue(world) == [False, False]
    world.pass_time(0.3)
    assert overdue(world) == [True, False]
    world.pass_time(7.7)
    assert worker.signals == []
    world.pass_time(0.3)
    assert worker.signals == ["abort"]
    world.run_workers()
    assert reader.read().grants[-1].dp_rank == 1
    assert overdue(world) == [False, False]


def test_a_worker_within_a_prompt_is_overdue_and_lost_by_the_pace_that_it_has_measured() -> None:
    world = World().bring_up()
    submit(world, max_tokens=50)
    world.run_workers(2)
    world.worker(0).send_heartbeat(step_tokens=500, prefill_token_s=0.002)
    world.core.on_arrival()
    world.worker(0).stopped = True
    # 8 times one second.
    world.pass_time(9.8)
    assert overdue(world) == [False, False]
    assert not world.core.ranks.get(0).takes_requests
    world.pass_time(0.3)
    assert overdue(world) == [True, False]
    world.pass_time(7.7)
    assert world.workers[0].signals == []
    world.pass_time(0.4)
    assert world.workers[0].signals == ["abort"]


def test_all_ranks_are_overdue_when_one_is_and_have_the_pace_of_the_slowest() -> None:
    world = World(serve_options(2, group=True)).bring_up()
    world.worker(0).send_heartbeat(prefill_token_s=0.001)
    world.worker(1).send_heartbeat(step_tokens=100, prefill_token_s=0.01)
    world.core.on_arrival()
    world.worker(1).stopped = True
    world.pass_time(9.8)
    assert overdue(world) == [False, False]
    world.pass_time(0.4)
    assert overdue(world) == [True, True]
    world.pass_time(8.0)
    assert world.workers[1].signals == ["abort"]


def test_members_of_a_group_wait_for_the_longest_step_of_any() -> None:
    world = World(serve_options(2, group=True)).bring_up()
    world.worker(1).send_heartbeat(step_tokens=512)
    for worker in world.workers:
        worker.stopped = True
    world.pass_time(60.0)
    assert [worker.signals for worker in world.workers] == [[], []]
    world.pass_time(2.0)
    assert [worker.signals for worker in world.workers[:2]] == [["abort"], ["abort"]]


def test_a_worker_that_ignores_a_request_is_replaced() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=2)
    world.worker(0).commands.clear()
    world.pass_time(9.9)
    assert world.worker(0).alive
    world.pass_time(0.6)
    assert not world.workers[0].alive
    world.run_workers(2)
    assert ended(reader).reason is FinishReason.LENGTH


def test_a_worker_that_keeps_a_cancelled_request_is_replaced() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=50)
    world.run_workers()
    world.worker(0).commands.clear()
    reader.answer.cancel()
    world.worker(0).commands.clear()
    for _ in range(32):
        world.worker(0).step += 1
        world.pass_time(1.0)
    assert not world.workers[0].alive


def test_a_silent_worker_gets_no_new_requests_and_is_not_lost_at_once() -> None:
    world = World().bring_up()
    world.pass_time(0.5)
    world.worker(0).stopped = True
    world.pass_time(3.0)
    readers = [submit(world, max_tokens=50) for _ in range(3)]
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert not owner.grants
    world.run_workers()
    assert {grant.dp_rank for reader in readers for grant in reader.read().grants} == {1}
    world.worker(0).stopped = False
    world.pass_time(0.5)
    world.run_workers()
    assert readers[2].read().grants[0].dp_rank == 0


def test_no_worker_is_judged_by_time_that_the_controller_slept() -> None:
    world = World().bring_up()
    submit(world, max_tokens=50)
    world.run_workers()
    world.clock.now += 60.0
    world.core.tick()
    world.pass_time(5.0)
    assert all(worker.alive for worker in world.workers)


def test_no_start_is_late_by_time_that_the_controller_slept() -> None:
    world = World()
    world.core.begin()
    world.clock.now += 700.0
    world.core.tick()
    assert world.workers[0].alive


def test_waiting_too_long_ends_with_queue_timeout() -> None:
    world = World(serve_options(1, queue=QueueOptions(queue_timeout_s=5.0))).bring_up()
    readers = [submit(world, max_tokens=900) for _ in range(3)]
    world.run_workers()
    for _ in range(6):
        world.run_workers()
        world.pass_time(1.0)
    end = ended(readers[2])
    assert (end.code, end.status) == ("queue_timeout", 503)
    assert readers[0].read().ended is None


@pytest.mark.parametrize("how", ["lost", "preempted"])
def test_an_answer_that_has_begun_is_not_ended_by_the_time_out_of_the_queue(how: str) -> None:
    world = World(serve_options(1, queue=QueueOptions(queue_timeout_s=5.0))).bring_up()
    reader = submit(world, max_tokens=9)
    silent = submit(world, (7,), max_tokens=9)
    world.run_workers(2)
    fresh = submit(world, (8,), max_tokens=9)
    if how == "lost":
        world.worker(0).die(-9)
    else:
        world.worker(0).preempt(1)
        world.core.on_arrival()
        world.worker(0).stopped = True
    world.pass_time(6.0, heartbeats=False)
    assert ended(fresh).code == "queue_timeout"
    assert reader.read().ended is None
    assert silent.read().ended is None
    assert reader.ids == expected(generation(), 2)


def test_running_too_long_ends_with_request_timeout_and_frees_the_slot() -> None:
    world = World(serve_options(1, queue=QueueOptions(request_timeout_s=5.0))).bring_up()
    reader = submit(world, max_tokens=900)
    for _ in range(6):
        world.run_workers()
        world.pass_time(1.0)
    end = ended(reader)
    assert (end.code, end.status) == ("request_timeout", 504)
    world.run_workers(2)
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert not owner.grants


def test_a_request_that_found_no_slot_is_queued_again_in_its_place() -> None:
    world = World(serve_options(1)).bring_up()
    # The worker has fewer slots than it reported.
    world.readies = {0: ready(slots=1)}
    first, second = submit(world, (1,), 3), submit(world, (2,), 3)
    world.run_workers()
    assert first.read().starts
    assert not second.read().starts
    # Asking again at once would only be refused again.
    assert not world.worker(0).commands
    world.run_workers(3)
    world.pass_time(0.6)
    world.run_workers(4)
    assert second.read().ids == expected(generation((2,)), 3)


@pytest.mark.parametrize("reason", [RejectReason.INVALID, RejectReason.TOO_LONG])
def test_a_request_that_a_worker_finds_wrong_ends(reason: RejectReason) -> None:
    world = World().bring_up()
    reader = submit(world)
    world.worker(0).commands.clear()
    world.worker(0).send_event(Rejected(request_id=1, epoch=1, reason=reason, message="why"))
    world.core.on_arrival()
    end = ended(reader)
    assert (end.code, end.status, end.message) == (f"rejected_{reason.value}", 400, "why")
    owner = world.core.ranks.get(0)
    assert owner is not None
    assert not owner.grants


def test_a_draining_worker_gets_nothing_more() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=2)
    world.worker(0).commands.clear()
    draining = Rejected(request_id=1, epoch=1, reason=RejectReason.DRAINING, message="")
    world.worker(0).send_event(draining)
    world.core.on_arrival()
    world.pass_time(1.0)
    world.run_workers(2)
    assert [grant.dp_rank for grant in reader.read().grants] == [0, 1]
    assert len(reader.starts) == 1
    with pytest.raises(OverloadedError):
        submit(world, rank=0)


FINISHED = Finished(request_id=1, epoch=1, reason=FinishReason.LENGTH, num_tokens=0)
ACCEPTED = Accepted(request_id=1, epoch=1, slot=0)
PREFILLED = Prefilled(request_id=1, epoch=1, cached_tokens=0)
PREEMPTED = Preempted(request_id=1, epoch=1, num_tokens=0)
REJECTED = Rejected(request_id=1, epoch=1, reason=RejectReason.NO_SLOT, message="")
CHUNK = TokenChunk(request_id=1, epoch=1, index=0, ids=(1, 2))


@pytest.mark.parametrize(
    "events",
    [
        (FINISHED,),
        (ACCEPTED, replace(FINISHED, num_tokens=2)),
        (ACCEPTED, REJECTED),
        (Tokens(chunks=(CHUNK,)),),
        (PREFILLED,),
        (ACCEPTED, Tokens(chunks=(CHUNK,))),
        (PREEMPTED,),
        (ACCEPTED, replace(PREEMPTED, num_tokens=1)),
        (Hello(pid=1),),
        (ready(),),
    ],
    ids=(
        *("early_end", "lost_token", "late_no", "early_token", "early_prefilled", "no_prefilled"),
        *("early_preempted", "lost_token_of_preempted", "hello", "ready"),
    ),
)
def test_impossible_events_replace_the_worker(events: tuple[Up, ...]) -> None:
    world = World().bring_up()
    reader = submit(world)
    world.worker(0).commands.clear()
    for event in events:
        world.worker(0).send_event(event)
    world.core.on_arrival()
    assert world.core.counters.protocol_errors == 1
    assert world.worker(0).signals == ["kill"]
    world.run_workers(4)
    assert reader.read().ids == expected(generation(), 4)


@pytest.mark.parametrize(
    "event",
    [
        replace(ACCEPTED, epoch=9),
        replace(REJECTED, epoch=9),
        replace(FINISHED, epoch=9),
        replace(FINISHED, request_id=9),
        replace(REJECTED, request_id=9),
        ACCEPTED,
        PREFILLED,
        replace(PREFILLED, epoch=9),
        replace(PREEMPTED, epoch=9),
        replace(PREEMPTED, request_id=9),
    ],
)
def test_stale_events_change_nothing(event: Up) -> None:
    world = World().bring_up()
    reader = submit(world)
    world.run_workers()
    world.worker(0).send_event(event)
    world.run_workers(3)
    assert reader.read().ids == expected(generation(), 4)
    assert len(reader.grants) == 1
    assert world.core.counters.stale_events == 1
    assert world.core.counters.protocol_errors == 0


def test_lost_requests_go_to_the_front_in_the_order_they_had() -> None:
    world = World().bring_up()
    for n in range(4):
        submit(world, (n,), 50)
    waiting = submit(world, (9,), 50)
    world.run_workers()
    world.worker(0).die(-9)
    world.pass_time(0.1)
    (head,) = world.core.table.queue.heads()
    assert head.request_id == 1
    assert not waiting.read().grants


@pytest.mark.parametrize(
    ("reason", "code"),
    [(FinishReason.ABORT, "worker_aborted"), (FinishReason.ERROR, "engine_error")],
)
def test_an_end_that_is_the_workers_own_is_an_error(reason: FinishReason, code: str) -> None:
    world = World().bring_up()
    reader = submit(world)
    world.run_workers()
    world.worker(0).send_event(replace(FINISHED, reason=reason, num_tokens=1, message="why"))
    world.core.on_arrival()
    assert ended(reader).code == code


def test_a_request_that_waits_for_its_rank_delays_no_other() -> None:
    world = World().bring_up()
    for _ in range(2):
        submit(world, rank=0, max_tokens=50)
    pinned = submit(world, rank=0)
    free = submit(world)
    assert [grant.dp_rank for grant in (world.run_workers(), free.read())[1].grants] == [1]
    assert not pinned.read().grants


def test_what_frees_at_a_rank_is_kept_for_the_large_request_that_waits_for_it() -> None:
    world = World(serve_options(1))
    world.readies = {0: ready(slots=9, pool=100)}
    world.bring_up()
    submit(world, (1,), 60)
    large = submit(world, (1,), 90, rank=0)
    small = submit(world, (1,), 5)
    world.run_workers(10)
    assert not small.read().grants
    world.run_workers(60)
    assert large.read().grants


def test_what_frees_is_kept_for_the_large_request_that_may_go_anywhere() -> None:
    world = World(serve_options(1))
    world.readies = {0: ready(slots=9, pool=100)}
    world.bring_up()
    submit(world, (1,), 60)
    large = submit(world, (1,), 90)
    small = submit(world, (1,), 5, rank=0)
    world.run_workers(10)
    assert not small.read().grants
    world.run_workers(60)
    assert large.read().grants


def test_a_rank_where_the_large_request_can_never_run_is_not_kept_for_it() -> None:
    world = World(serve_options(2))
    world.readies = {0: ready(slots=9, pool=100), 1: ready(slots=9, pool=50, context=50)}
    world.bring_up()
    submit(world, (1,), 60, rank=0)
    large = submit(world, (1,), 90)
    small = submit(world, (1,), 5, rank=1)
    assert small.read().grants
    assert not large.read().grants


def test_a_pinned_request_whose_owner_fails_for_good_ends() -> None:
    world = World(limits=ControlLimits(max_attempts=99)).bring_up()
    for _ in range(2):
        submit(world, rank=1, max_tokens=900)
    waiting = submit(world, rank=1)
    world.auto_ready = False
    world.worker(1).die(-9)
    for _ in range(1200):
        world.pass_time(0.1)
        if world.core.supervisor.workers[1].status is WorkerStatus.FAILED:
            break
        for worker in world.alive():
            if worker.index == 1:
                worker.die(1)
    end = ended(waiting)
    assert (end.code, end.status) == ("worker_failed", 503)
    assert world.core.status() is ServiceStatus.READY


def test_a_worker_that_is_not_connected_when_granted_is_lost_and_the_request_goes_on() -> None:
    world = World().bring_up()
    world.cut.add(world.worker(0).identity)
    reader = submit(world, max_tokens=2)
    world.run_workers(2)
    assert ended(reader).reason is FinishReason.LENGTH
    assert reader.grants[0].dp_rank == 1
    assert world.worker(0).signals == ["kill"]


def test_a_congested_worker_gets_nothing_until_its_next_event() -> None:
    world = World().bring_up()
    identity = world.worker(0).identity
    world.congested.add(identity)
    readers = [submit(world, max_tokens=9) for _ in range(3)]
    assert len(world.core.table.queue) == 1
    world.congested.clear()
    world.run_workers()
    assert len(world.core.table.queue) == 1
    world.pass_time(0.1)
    world.run_workers()
    assert readers[2].read().grants[0].dp_rank == 0


def test_a_start_failure_that_would_repeat_stops_the_whole_service_with_its_cause() -> None:
    world = World(serve_options(3))
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.workers[0].fail(FailureKind.CONFIG, "there is no model at /nowhere")
    world.pass_time(0.1)
    assert world.core.status() is ServiceStatus.DEAD
    assert len(world.workers) == 1
    cause = world.core.supervisor.cause
    assert cause is not None
    assert cause.detail == "there is no model at /nowhere"
    assert cause.failure is FailureKind.CONFIG


def test_a_worker_that_does_not_fit_into_memory_leaves_the_others_serving() -> None:
    world = World()
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    world.workers[0].become_ready()
    world.settle()
    world.greet()
    world.workers[1].fail(FailureKind.OUT_OF_MEMORY, "no room", 7)
    world.pass_time(40.0)
    assert world.core.status() is ServiceStatus.READY
    assert world.core.supervisor.workers[1].status is WorkerStatus.FAILED
    assert len(world.workers) == 2
    with pytest.raises(OverloadedError):
        submit(world, rank=1)


def test_a_crash_loop_ends_in_failure_and_ends_what_waits() -> None:
    world = World(serve_options(1)).bring_up()
    readers = [submit(world, max_tokens=900) for _ in range(4)]
    world.auto_ready = False
    world.worker(0).kill()
    for _ in range(1200):
        world.pass_time(0.1)
        if world.core.status() is ServiceStatus.DEAD:
            break
        for worker in world.alive():
            worker.die(1)
    assert world.core.status() is ServiceStatus.DEAD
    assert len(world.workers) == 6
    assert {ended(reader).code for reader in readers} == {"no_worker"}
    with pytest.raises(OverloadedError) as refused:
        submit(world)
    assert refused.value.status == 503


def test_a_group_restarts_as_one_and_only_the_culprit_counts() -> None:
    world = World(serve_options(2, group=True)).bring_up()
    assert world.core.status() is ServiceStatus.READY
    readers = [submit(world, (n,), 6, seed=n) for n in range(2)]
    world.run_workers(2)
    world.worker(1).kill()
    world.pass_time(0.1)
    assert not world.alive() or all(worker.pid > 1001 for worker in world.alive())
    assert world.core.status() is ServiceStatus.STARTING
    world.recover()
    assert [worker.epoch for worker in world.core.supervisor.workers] == [1, 1]
    assert [worker.index for worker in world.workers] == [0, 1, 0, 1]
    world.run_workers(6)
    for n, reader in enumerate(readers):
        assert reader.read().ids == expected(generation((n,), seed=n), 6)


def test_a_member_that_misses_another_first_is_not_to_blame_for_its_end() -> None:
    world = World(serve_options(2, group=True)).bring_up()
    readers = [submit(world, (n,), 900, seed=n) for n in range(2)]
    world.run_workers(2)
    world.worker(1).die(-9)
    world.worker(0).fail(FailureKind.INTERNAL, "a peer is gone", 4)
    world.core.on_arrival()
    causes = [worker.last_cause for worker in world.core.supervisor.workers]
    assert causes[0].startswith("worker 1: killed by SIGKILL")
    assert causes[1].startswith("killed by SIGKILL")
    assert all(reader.read().ended is None for reader in readers)


def test_draining_refuses_new_requests_and_finishes_those_in_hand() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=3)
    world.core.draining = True
    with pytest.raises(OverloadedError) as refused:
        submit(world)
    assert refused.value.status == 503
    world.run_workers(3)
    assert ended(reader).reason is FinishReason.LENGTH
    assert world.core.lifecycle.idle


def test_no_process_to_be_had_is_retried() -> None:
    world = World(serve_options(1))
    world.no_processes = True
    world.core.begin()
    assert world.core.supervisor.workers[0].status is WorkerStatus.LOST
    world.no_processes = False
    world.recover()
    assert world.core.status() is ServiceStatus.READY


def test_a_worker_that_never_becomes_ready_is_killed_and_counted_as_failed_start() -> None:
    world = World(serve_options(1))
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.deaf_to_abort = True
    world.pass_time(600.2)
    assert world.workers[0].signals == ["abort"]
    world.pass_time(1.0)
    assert world.workers[0].signals == ["abort", "kill"]
    assert world.core.supervisor.workers[0].message == "not ready after 600 s"


def test_a_worker_that_never_says_hello_holds_up_the_others_for_a_minute_only() -> None:
    world = World()
    world.core.begin()
    world.pass_time(60.2)
    assert world.workers[0].signals == ["abort"]
    world.pass_time(0.1)
    assert world.workers[1].index == 1


def test_the_owner_is_told_at_the_grant_and_not_only_when_it_has_accepted() -> None:
    world = World(serve_options(1)).bring_up()
    world.readies = {0: ready(slots=1)}
    reader = submit(world).read()
    assert [(grant.dp_rank, grant.reason) for grant in reader.grants] == [(0, "total_tokens")]
    world.settle()
    assert not reader.read().starts
    world.run_workers()
    assert len(reader.read().starts) == len(reader.grants) == 1


def test_what_could_not_be_sent_is_no_grant() -> None:
    world = World(serve_options(1)).bring_up()
    world.congested = {world.worker(0).identity}
    reader = submit(world).read()
    assert not reader.grants
    assert not world.core.counters.grants
    world.congested = set()
    world.pass_time(1.0)
    world.settle()
    assert len(reader.read().grants) == world.core.counters.grants["total_tokens"] == 1


def test_a_request_that_cannot_be_sent_uses_up_its_time_in_the_queue() -> None:
    world = World(serve_options(1, queue=QueueOptions(queue_timeout_s=5.0))).bring_up()
    world.congested = {world.worker(0).identity}
    reader = submit(world)
    # Each heartbeat lets the owner be tried again.
    world.pass_time(4.5)
    assert reader.read().ended is None
    world.pass_time(1.0)
    assert ended(reader).code == "queue_timeout"
    assert not reader.grants


def test_a_request_that_could_not_be_sent_is_bound_to_no_owner_and_keeps_its_epoch() -> None:
    world = World(serve_options(2)).bring_up()
    world.readies[0] = ready(pool=30)
    world.congested = {worker.identity for worker in world.alive()}
    submit(world, max_tokens=None)
    entry = next(iter(world.core.table))
    assert (entry.status, entry.epoch, entry.max_tokens) == ("queued", 0, None)
    assert (entry.granted_at, entry.last_dp_rank) == (None, None)
    world.congested = set()
    world.pass_time(1.0)
    assert entry.epoch == 1


def test_a_replay_is_granted_again_but_starts_and_counts_once() -> None:
    world = World().bring_up()
    reader = submit(world, max_tokens=6)
    world.run_workers(2)
    world.worker(0).kill()
    world.recover(1.0)
    world.run_workers(6)
    assert ended(reader).reason is FinishReason.LENGTH
    assert [grant.dp_rank for grant in reader.grants] == [0, 1]
    assert len(reader.starts) == 1
    assert world.core.counters.grants.total() == 2
    assert world.core.counters.prompt_by_owner == {0: 3}
    assert world.core.counters.cached_by_owner.total() == 0
    assert world.core.counters.generated_by_owner == {0: 2, 1: 4}


def test_owners_show_what_each_of_them_had_to_do() -> None:
    world = World(serve_options(1)).bring_up()
    submit(world, (1, 2, 3), 4)
    worker = world.worker(0)
    (sent,) = worker.commands
    worker.commands.clear()
    assert isinstance(sent, Submit)
    worker.running[sent.request_id] = Running(sent, 0, prefilled=True)
    worker.send_event(Accepted(request_id=sent.request_id, epoch=1, slot=0))
    worker.send_event(Prefilled(request_id=sent.request_id, epoch=1, cached_tokens=2))
    world.run_workers(2)
    (owner,) = world.core.views.owners()
    totals = (owner.prompt_tokens_total, owner.cached_tokens_total, owner.generated_tokens_total)
    assert totals == (3, 2, 2)


def test_owners_show_what_they_hold_and_nothing_once_they_are_lost() -> None:
    world = World(serve_options(1))
    world.readies = {0: replace(ready(), buffer_limit=249_500)}
    world.bring_up()
    world.worker(0).send_heartbeat(
        cached_tokens=3, cached_nbytes=192, held_nbytes=500, held_buffers=84
    )
    world.core.on_arrival()
    (owner,) = world.core.views.owners()
    assert (owner.prefix_tokens, owner.prefix_nbytes, owner.held_nbytes) == (3, 192, 500)
    assert (owner.held_buffers, owner.buffer_limit) == (84, 249_500)
    world.worker(0).kill()
    world.pass_time(0.1)
    (owner,) = world.core.views.owners()
    assert (owner.prefix_tokens, owner.prefix_nbytes, owner.held_nbytes) == (0, 0, 0)
    assert (owner.held_buffers, owner.buffer_limit) == (0, None)


def test_the_salt_goes_along() -> None:
    world = World(serve_options(1)).bring_up()
    submit(world, salt="tenant")
    (sent,) = world.worker(0).commands
    assert isinstance(sent, Submit)
    assert sent.cache_salt == "tenant"


def test_a_salt_that_no_message_may_have_never_reaches_a_worker() -> None:
    world = World(serve_options(1)).bring_up()
    submit(world, salt="s" * MAX_CACHE_SALT_CHARS)
    with pytest.raises(RefusedError, match="use at most 256") as refused:
        submit(world, salt="s" * (MAX_CACHE_SALT_CHARS + 1))
    assert refused.value.param == "cache_salt"
    assert len(world.worker(0).commands) == 1


def test_a_complete_response_ends_as_stop_and_a_cancelled_one_as_abort() -> None:
    world = World().bring_up()
    complete, unwanted = submit(world), submit(world)
    world.run_workers()
    complete.answer.complete()
    unwanted.answer.cancel()
    assert ended(complete).reason is FinishReason.STOP
    assert ended(unwanted).reason is FinishReason.ABORT
    assert (world.core.counters.requests_ok, world.core.counters.requests_aborted) == (1, 1)
    world.run_workers(2)
    assert not any(worker.running for worker in world.alive())


def test_observers_hear_of_each_step_with_its_time() -> None:
    heard: list[tuple[str, float]] = []

    class Observer:
        def started(self, queued_s: float) -> None:
            heard.append(("started", round(queued_s, 1)))

        def first_token(self, waited_s: float) -> None:
            heard.append(("first", round(waited_s, 1)))

        def next_tokens(self, gap_s: float) -> None:
            heard.append(("next", round(gap_s, 1)))

        def ended(self, timings: RequestTimings) -> None:
            heard.append(("ended", round(timings.ended_s, 1)))

    world = World(serve_options(1))
    world.readies = {0: ready(slots=1)}
    world.bring_up()
    world.core.streams.observe(Observer())
    first = submit(world, max_tokens=2)
    world.run_workers(1)
    second = submit(world, max_tokens=2)
    world.pass_time(2.0)
    world.run_workers(1)
    assert ended(first).reason is FinishReason.LENGTH
    world.run_workers(1)
    world.pass_time(1.0)
    world.run_workers(1)
    assert ended(second).reason is FinishReason.LENGTH
    assert heard[:3] == [("started", 0.0), ("first", 0.0), ("next", 2.0)]
    assert heard.count(("ended", 2.0)) == 1
    assert heard[-1] == ("ended", 3.0)
    assert [each for each in heard if each[0] == "started"] == [("started", 0.0), ("started", 2.0)]
    assert [each for each in heard if each[0] == "first"] == [("first", 0.0), ("first", 2.0)]


def test_counters_reconcile() -> None:
    world = World().bring_up()
    readers = [submit(world, (n,), 5) for n in range(8)]
    readers[7].answer.cancel()
    world.run_workers(2)
    world.worker(0).kill()
    world.recover(1.0)
    world.run_workers(40)
    counters = world.core.counters
    assert counters.requests_started == 8
    assert counters.requests_ok + counters.requests_error + counters.requests_aborted == 8
    assert counters.worker_deaths == counters.worker_restarts == 1
    assert counters.generated_by_owner.total() == 35
