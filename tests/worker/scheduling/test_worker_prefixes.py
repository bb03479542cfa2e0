"""The worker loop's use of the prefix cache: reads, saves, and their order."""

from collections.abc import Iterable

import pytest

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.proto.messages.commands import Abort, FakeEngineOptions, Flush, Submit
from mlx_dp.proto.messages.events import Finished, Flushed, Heartbeat, Prefilled, Tokens, Up
from mlx_dp.worker.contract.engine import Drawn, PrefillChunk, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.worker_bench import Bench, submit

HYBRID = FakeEngineOptions(hybrid=True)
DENSE = FakeEngineOptions()
BOTH = pytest.mark.parametrize("options", [DENSE, HYBRID], ids=["dense", "hybrid"])


class Watched(FakeEngine):
    """Records its calls, in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.chunks: list[PrefillChunk] = []
        self.told: list[str] = []
        self.kept: list[tuple[tuple[Save, ...], int | None]] = []

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        self.chunks += plan.prefill
        return super().step(plan)

    def save_prefix(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        self.told.append("keep")
        self.kept.append((saves, snapshot))
        super().save_prefix(slot, saves, snapshot)

    def remove(self, slot: int) -> None:
        self.told.append("remove")
        super().remove(slot)


def watched(options: FakeEngineOptions = DENSE, **given: object) -> tuple[Bench, Watched]:
    bench = Bench(options=options, engine=Watched, prefix_cache=True, **given)  # type: ignore[arg-type]
    assert isinstance(bench.engine, Watched)
    return bench, bench.engine


def run(bench: Bench, *commands: Submit) -> list[Up]:
    """All events until these requests have ended."""
    sent = bench.run_once(*commands)
    for _ in range(500):
        if not len(bench.scheduler.requests):
            return sent
        sent += bench.run_once()
    raise AssertionError("it does not end")


def cached(sent: Iterable[Up]) -> dict[int, int]:
    return {m.request_id: m.cached_tokens for m in sent if isinstance(m, Prefilled)}


def answer(sent: Iterable[Up], request_id: int) -> tuple[int, ...]:
    return tuple(
        token
        for message in sent
        if isinstance(message, Tokens)
        for chunk in message.chunks
        if chunk.request_id == request_id
        for token in chunk.ids
    )


@BOTH
def test_a_prompt_that_was_seen_is_not_computed_again(options: FakeEngineOptions) -> None:
    bench, engine = watched(options)
    run(bench, submit(1, prompt=100))
    sent = run(bench, submit(2, prompt=100))
    assert cached(sent) == {2: 99}
    assert engine.chunks[-1].num_tokens == 1


@BOTH
def test_the_next_turn_computes_only_what_is_new(options: FakeEngineOptions) -> None:
    bench, engine = watched(options)
    first = (65,) * 100
    said = answer(run(bench, submit(1, prompt=first, max_tokens=10)), 1)
    # The answer's last token was never fed.
    history = first + said[:-1]
    sent = run(bench, submit(2, prompt=(*history, said[-1], 1, 2, 3)))
    assert cached(sent) == {2: len(history)}
    assert engine.chunks[-1].num_tokens == 4


@BOTH
def test_salts_keep_tenants_apart(options: FakeEngineOptions) -> None:
    bench, _ = watched(options)
    run(bench, submit(1, prompt=100, salt="one"))
    assert cached(run(bench, submit(2, prompt=100, salt="other"))) == {2: 0}
    assert cached(run(bench, submit(3, prompt=100, salt="one"))) == {3: 99}


@BOTH
def test_equal_prompts_that_arrive_together_prefill_once(options: FakeEngineOptions) -> None:
    bench, engine = watched(options, slots=3)
    sent = run(bench, *(submit(number, prompt=200, max_tokens=30) for number in (1, 2, 3)))
    assert cached(sent) == {1: 0, 2: 199, 3: 199}
    assert sum(chunk.num_tokens for chunk in engine.chunks) == 200 + 1 + 1
    assert answer(sent, 1) == answer(sent, 2) == answer(sent, 3)


def test_a_waiting_request_begins_in_the_plan_that_ends_the_awaited_prompt() -> None:
    bench, engine = watched()
    bench.run_once(submit(1, prompt=64), submit(2, prompt=64))
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 64)]
    bench.run_once()
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 64), (1, 1)]


def test_a_prompt_that_shares_little_with_another_does_not_wait() -> None:
    bench, engine = watched()
    common = (65,) * 63
    bench.run_once(submit(1, prompt=common + (1,) * 90), submit(2, prompt=common + (2,) * 3))
    for _ in range(2):
        bench.run_once()
    assert [chunk.slot for chunk in engine.chunks] == [0, 0, 0, 1]


@BOTH
def test_a_waiting_request_goes_on_when_the_other_is_gone(options: FakeEngineOptions) -> None:
    bench, engine = watched(options)
    bench.run_once(submit(1, prompt=300), submit(2, prompt=300))
    assert {chunk.slot for chunk in engine.chunks} == {0}
    sent = bench.run_once(Abort(request_id=1, epoch=1))
    assert engine.chunks[-1].slot == 1
    sent += run(bench)
    # The KV that the aborted one had computed is not lost.
    assert cached(sent) == {2: 64}


def test_a_waiting_request_can_be_aborted_and_keeps_nothing() -> None:
    bench, engine = watched()
    bench.run_once(submit(1, prompt=300), submit(2, prompt=300))
    sent = bench.run_once(Abort(request_id=2, epoch=1))
    assert any(isinstance(message, Finished) and message.request_id == 2 for message in sent)
    assert engine.told == ["remove"]
    bench.scheduler.check()


def test_on_a_hybrid_only_what_will_have_a_state_is_worth_waiting_for() -> None:
    bench, engine = watched(HYBRID, chunk=512)
    common = (65,) * 100
    # The first one's states will lie at 128 and 159: the other could begin with neither.
    bench.run_once(submit(1, prompt=common + (1,) * 60), submit(2, prompt=common + (2,) * 20))
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 128), (1, 64)]


def test_no_request_waits_for_another_tenant() -> None:
    bench, engine = watched(HYBRID, chunk=512)
    bench.run_once(submit(1, prompt=160, salt="one"), submit(2, prompt=160, salt="other"))
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 128), (1, 128)]


def test_what_the_tree_has_nearly_all_of_is_not_waited_for() -> None:
    bench, engine = watched(HYBRID, chunk=512)
    run(bench, submit(1, prompt=151))
    engine.chunks.clear()
    bench.run_once(submit(2, prompt=196), submit(3, prompt=196))
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 42), (1, 42)]


def test_on_a_hybrid_a_state_to_come_is_waited_for() -> None:
    bench, engine = watched(HYBRID, chunk=512)
    common = (65,) * 130
    sent = bench.run_once(
        submit(1, prompt=common + (1,) * 30), submit(2, prompt=common + (2,) * 20)
    )
    assert [(chunk.slot, chunk.num_tokens) for chunk in engine.chunks] == [(0, 128)]
    assert cached(sent + run(bench)) == {1: 0, 2: 128}


def test_states_are_kept_at_the_last_boundary_and_at_the_prompts_end() -> None:
    bench, engine = watched(HYBRID)
    run(bench, submit(1, prompt=71))
    assert [chunk.num_tokens for chunk in engine.chunks] == [64, 7]
    assert all(chunk.snapshot is not None for chunk in engine.chunks)


def test_a_boundary_at_the_end_is_tracked_by_the_chunk_that_completes_the_prompt() -> None:
    bench, engine = watched(HYBRID, chunk=512)
    run(bench, submit(1, prompt=65))
    engine.chunks.clear()
    run(bench, submit(2, prompt=(65,) * 64 + (1,) * 193, max_tokens=1))
    (chunk,) = engine.chunks
    assert chunk.prefix is not None
    assert (chunk.prefix.num_tokens, chunk.num_tokens) == (64, 193)
    assert chunk.snapshot is not None
    assert cached(run(bench, submit(3, prompt=(65,) * 64 + (1,) * 192 + (2,) * 9))) == {3: 256}


@BOTH
def test_what_was_computed_is_kept_then_released_then_reported(
    options: FakeEngineOptions,
) -> None:
    bench, engine = watched(options)
    sent = run(bench, submit(1, prompt=10, max_tokens=5))
    assert engine.told == ["keep", "remove"]
    assert [message.tag for message in sent[-2:]] == ["tokens", "finished"]
    ((saves, snapshot),) = engine.kept
    assert [(save.start, save.end) for save in saves] == [(9, 14)]
    assert (snapshot is not None) is options.hybrid


@BOTH
def test_a_prompt_under_way_leaves_what_is_done_of_it(options: FakeEngineOptions) -> None:
    bench, engine = watched(options)
    bench.run_once(submit(1, prompt=300))
    bench.run_once(Abort(request_id=1, epoch=1))
    assert engine.told == ["keep", "remove"]
    assert cached(run(bench, submit(2, prompt=300))) == {2: 64}


def test_a_flush_drops_what_is_cached_and_says_how_much() -> None:
    bench, _ = watched()
    run(bench, submit(1, prompt=100, max_tokens=3))
    (flushed,) = bench.run_once(Flush(flush_id=7))
    assert flushed == Flushed(flush_id=7, num_tokens=102, nbytes=102 * 1024)
    assert cached(run(bench, submit(2, prompt=100))) == {2: 0}


def test_a_flush_without_the_prefix_cache_drops_nothing() -> None:
    bench = Bench()
    assert bench.run_once(Flush(flush_id=7)) == [Flushed(flush_id=7, num_tokens=0, nbytes=0)]


def test_heartbeats_say_what_is_cached_and_held() -> None:
    bench, _ = watched()
    run(bench, submit(1, prompt=100, max_tokens=3))
    bench.scheduler.idle()
    bench.time.sleep(1.0)
    bench.loop.run_once()
    (heartbeat,) = bench.channel.sent_of(Heartbeat)[-1:]
    assert (heartbeat.cached_tokens, heartbeat.cached_nbytes) == (102, 102 * 1024)
    assert heartbeat.held_nbytes >= heartbeat.cached_nbytes
    assert (heartbeat.running, heartbeat.reserved_tokens, heartbeat.used_tokens) == (0, 0, 0)


@BOTH
def test_a_replayed_answer_is_found_with_its_prompt(options: FakeEngineOptions) -> None:
    bench, _ = watched(options)
    prompt = (65,) * 100
    said = answer(run(bench, submit(1, prompt=prompt, max_tokens=20)), 1)
    sent = run(bench, submit(2, prompt=prompt, output_ids=said[:19], max_tokens=20))
    assert answer(sent, 2) == said[19:]
    assert cached(sent) == {2: 99 if options.hybrid else 118}
