"""Memory shortage: the prefix cache goes first, then the youngest request, never the last one."""

from mlx_dp.proto.messages.events import (
    Finished,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    Tokens,
    Up,
)
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.worker_bench import Bench, submit


def turns(bench: Bench, count: int) -> list[Up]:
    return [message for _ in range(count) for message in bench.run_once()]


def until_idle(bench: Bench) -> list[Up]:
    sent: list[Up] = []
    for _ in range(2_000):
        if not len(bench.scheduler.requests):
            return sent
        sent += bench.run_once()
    raise AssertionError("it does not end")


def test_an_answer_that_grows_beyond_what_was_set_aside_preempts_the_youngest() -> None:
    bench = Bench(budget=600, slots=3)
    bench.run_once(submit(1, prompt=10, max_tokens=500), submit(2, prompt=10, max_tokens=500))
    sent = until_idle(bench)
    (preempted,) = [message for message in sent if isinstance(message, Preempted)]
    assert (preempted.request_id, preempted.epoch) == (2, 1)
    emitted = [chunk for m in sent if isinstance(m, Tokens) for chunk in m.chunks]
    assert preempted.num_tokens == sum(chunk.request_id == 2 for chunk in emitted)
    (finished,) = [message for message in sent if isinstance(message, Finished)]
    assert (finished.request_id, finished.num_tokens) == (1, 500)
    # Together they had the whole budget, except for the reserve of the step in flight.
    assert 560 <= 20 + 2 * preempted.num_tokens <= 600


def test_a_preempted_request_is_gone_before_it_is_reported() -> None:
    told: list[str] = []

    class Watched(FakeEngine):
        def remove(self, slot: int) -> None:
            super().remove(slot)
            told.append(f"remove {slot}")
            told.extend(message.tag for message in bench.channel.sent if message.tag == "preempted")

    bench = Bench(budget=600, engine=Watched, prefix_cache=True)
    bench.run_once(submit(1, prompt=10, max_tokens=500), submit(2, prompt=10, max_tokens=500))
    while not told:
        bench.run_once()
    assert told == ["remove 1"]
    bench.scheduler.check()


def test_cached_prefixes_go_before_any_request_does() -> None:
    bench = Bench(budget=1_000, prefix_cache=True)
    for number in (1, 2, 3):
        bench.run_once(submit(number, prompt=(number,) * 200, max_tokens=2))
        until_idle(bench)
    assert bench.scheduler.cached_tokens > 400
    sent = bench.run_once(
        submit(9, prompt=300, max_tokens=100), submit(10, prompt=2, max_tokens=100)
    )
    sent += until_idle(bench)
    assert not any(isinstance(message, Preempted | Rejected) for message in sent)
    sent = bench.run_once(submit(11, prompt=(2,) * 200, max_tokens=2)) + until_idle(bench)
    (again,) = [message for message in sent if isinstance(message, Prefilled)]
    assert again.cached_tokens == 0, "the oldest prefix has made room"


def test_room_that_rows_left_is_given_back_before_a_request_is_preempted() -> None:
    compacted: list[int] = []

    class Watched(FakeEngine):
        def compact(self) -> None:
            compacted.append(self.held_nbytes)
            super().compact()

    bench = Bench(budget=400, slots=3, engine=Watched, prefix_cache=True)
    bench.run_once(submit(1, prompt=150, max_tokens=2), submit(2, prompt=10, max_tokens=180))
    sent = until_idle(bench)
    assert not any(isinstance(message, Preempted) for message in sent)
    bench.run_once(submit(3, prompt=(1,) * 190, max_tokens=150))
    sent = until_idle(bench)
    assert compacted


def test_the_last_request_goes_on_beyond_the_budget() -> None:
    bench = Bench(budget=20, prefix_cache=True)
    sent = bench.run_once(submit(1, prompt=30, max_tokens=30)) + until_idle(bench)
    assert not any(isinstance(message, Preempted) for message in sent)
    assert sent[-1].tag == "finished"
    # None of its KV is kept, as there is no memory beside it.
    assert bench.scheduler.cached_tokens == 0


def test_the_last_request_has_all_that_cached_prefixes_took() -> None:
    bench = Bench(budget=50, prefix_cache=True)
    bench.run_once(submit(1, prompt=(1,) * 10, max_tokens=2))
    until_idle(bench)
    assert bench.scheduler.cached_tokens == 11
    bench.run_once(submit(2, prompt=(2,) * 60, max_tokens=9))
    assert bench.scheduler.cached_tokens == 0


def test_a_prompt_under_way_is_preempted_like_any_other() -> None:
    bench = Bench(budget=700, prefix_cache=True)
    bench.run_once(submit(1, prompt=10, max_tokens=600))
    turns(bench, 250)
    sent = bench.run_once(submit(2, prompt=150, max_tokens=2))
    sent += until_idle(bench)
    bench.scheduler.check()
    assert [m.request_id for m in sent if isinstance(m, Preempted | Finished)][-1] == 1


def test_what_does_not_fit_beside_the_others_is_refused_and_fits_later() -> None:
    bench = Bench(budget=100)
    bench.run_once(submit(1, prompt=50, max_tokens=20))
    (rejected, *_) = bench.run_once(submit(2, prompt=32, max_tokens=20))
    assert isinstance(rejected, Rejected)
    assert rejected.reason is RejectReason.NO_TOKENS
    until_idle(bench)
    assert bench.run_once(submit(2, prompt=32, max_tokens=20))[0].tag == "accepted"


def test_a_replayed_request_is_prefilled_once_more_and_says_so() -> None:
    bench = Bench(budget=600, slots=3)
    bench.run_once(submit(1, prompt=10, max_tokens=500), submit(2, prompt=10, max_tokens=500))
    sent = until_idle(bench)
    emitted = tuple(
        token
        for message in sent
        if isinstance(message, Tokens)
        for chunk in message.chunks
        if chunk.request_id == 2
        for token in chunk.ids
    )
    again = bench.run_once(submit(2, prompt=10, output_ids=emitted, max_tokens=500))
    again += until_idle(bench)
    assert sum(isinstance(message, Prefilled) for message in again) == 1
    assert isinstance(again[-1], Finished)
    assert again[-1].num_tokens == 500
