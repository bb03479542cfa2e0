"""Capacity through the worker's real start-up: flags to slices, Start over a socket, Ready back."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import EngineKind, FakeEngineOptions, Flush, Shutdown, Submit
from mlx_dp.proto.messages.events import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Flushed,
    Heartbeat,
    Hello,
    Prefilled,
    Ready,
    Rejected,
    RejectReason,
    WorkerPhase,
)
from mlx_dp.worker.__main__ import main as worker_command
from mlx_dp.worker.fake.engine import AUXILIARY_BYTES_PER_SLOT, KV_BYTES_PER_TOKEN, FakeEngine


@dataclass(frozen=True, kw_only=True)
class Golden:
    """Flags and pool as given, and what each owner must report."""

    slots: int
    auxiliary: int = 0
    requests: int | None = None
    aux_flag: int | None = None
    dp_size: int = 1
    dp_attention: bool = False
    pool: int = 100_000
    hybrid: bool = False
    prefix_cache: bool = True


GOLDEN = [
    Golden(requests=8, dp_size=4, slots=8),
    Golden(requests=8, dp_size=4, dp_attention=True, slots=2),
    Golden(
        requests=8, aux_flag=16, dp_size=4, dp_attention=True, hybrid=True, slots=1, auxiliary=4
    ),
    Golden(requests=None, pool=1_000, slots=500),
    Golden(requests=None, pool=100_000, slots=4_096),
    Golden(requests=1, slots=1),
    Golden(requests=64, slots=64),
    Golden(requests=1_000, pool=100, slots=50),
    Golden(requests=8, aux_flag=4, hybrid=True, slots=1, auxiliary=4),
    Golden(requests=8, aux_flag=8, hybrid=True, prefix_cache=False, slots=8, auxiliary=8),
    Golden(requests=8, hybrid=True, slots=8, auxiliary=32),
    Golden(requests=8, hybrid=True, prefix_cache=False, slots=8, auxiliary=8),
    Golden(requests=8, dp_size=4, dp_attention=True, hybrid=True, slots=2, auxiliary=8),
]


def name(golden: Golden) -> str:
    return ",".join(
        f"{field}={value}"
        for field in golden.__dataclass_fields__
        if (value := getattr(golden, field)) != Golden.__dataclass_fields__[field].default
    )


@pytest.mark.parametrize("golden", GOLDEN, ids=name)
def test_ready_reports_the_golden_capacity(
    golden: Golden, controller, worker_thread, shares, start_message
) -> None:
    slices = shares(
        dp_size=golden.dp_size,
        dp_attention=golden.dp_attention,
        requests=golden.requests,
        auxiliary=golden.aux_flag,
    )
    fake = FakeEngineOptions(pool_tokens=golden.pool, hybrid=golden.hybrid)
    for share in slices:
        ended = worker_thread()
        controller.receive_until(Hello)
        controller.send(start_message(share, fake=fake, prefix_cache=golden.prefix_cache))
        ready = controller.receive_until(Ready)
        assert ready.capacity.request_slots == golden.slots
        assert ready.capacity.auxiliary_slots == golden.auxiliary
        assert ready.capacity.pool_tokens == golden.pool
        controller.send(Shutdown())
        assert ended.result(timeout=200.0) is ExitCode.OK


def test_a_limit_on_open_files_that_mlx_lm_does_not_bear_is_refused_before_it_is_imported(
    controller, worker_thread, shares, start_message, low_descriptor_limit
) -> None:
    ended = worker_thread()
    controller.receive_until(Hello)
    (share,) = shares(dp_size=1, requests=1)
    controller.send(replace(start_message(share), engine=EngineKind.MLX))
    failed = controller.receive_until(Failed)
    assert failed.kind is FailureKind.CONFIG
    assert failed.message.startswith("the hard limit on open files is 1024, and mlx-lm needs 4096")
    assert ended.result(timeout=200.0) is ExitCode.CONFIG


def test_the_probe_refuses_such_a_limit_in_the_same_sentence(
    capsys: pytest.CaptureFixture[str], low_descriptor_limit
) -> None:
    assert worker_command(["probe", "/nowhere"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.startswith("the hard limit on open files is 1024, and mlx-lm needs 4096")


@pytest.mark.parametrize("given", [15, 4, 1])
def test_too_few_auxiliary_slots_are_refused_in_the_flags_units(
    given: int, controller, worker_thread, shares, start_message
) -> None:
    (*_, share) = shares(dp_size=4, dp_attention=True, requests=8, auxiliary=given)
    failed = fail(
        controller, worker_thread, start_message(share, fake=FakeEngineOptions(hybrid=True))
    )
    assert failed.kind is FailureKind.CONFIG
    assert f"--max-mamba-cache-size {given}" in failed.message
    assert f"leaves {given // 4} auxiliary slots per owner" in failed.message
    assert "at least 16" in failed.message


def test_a_share_of_no_request_is_refused_before_any_worker_starts(shares) -> None:
    with pytest.raises(ConfigError, match=r"--max-running-requests 1 .*at least 4"):
        shares(dp_size=4, dp_attention=True, requests=1)


def test_a_pool_that_backs_no_request_is_refused(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares(tokens=1)
    failed = fail(controller, worker_thread, start_message(share))
    assert failed.kind is FailureKind.CONFIG
    assert "1 KV tokens" in failed.message


def fail(controller, worker_thread: Callable[[], Future[ExitCode]], start) -> Failed:
    ended = worker_thread()
    controller.receive_until(Hello)
    controller.send(start)
    while not isinstance(message := controller.receive(), Failed):
        assert isinstance(message, Heartbeat)
    assert ended.result(timeout=200.0) is ExitCode[message.kind.name]
    return message


def test_a_limit_beyond_the_pool_warns_with_both_numbers(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares(requests=1_000)
    ready = become_ready(
        controller, worker_thread, start_message(share, fake=FakeEngineOptions(pool_tokens=100))
    )
    (warning,) = ready.capacity.warnings
    assert "1000" in warning
    assert "100 KV tokens back only 50" in warning


def become_ready(controller, worker_thread: Callable[[], Future[ExitCode]], start) -> Ready:
    worker_thread()
    controller.receive_until(Hello)
    controller.send(start)
    ready = controller.receive_until(Ready)
    controller.send(Shutdown())
    return ready


def test_ready_tells_how_many_buffers_the_device_lets_it_hold(
    controller,
    worker_thread,
    shares,
    start_message,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = FakeEngine.facts.fget
    counted = property(lambda engine: replace(facts(engine), buffer_limit=249_500))
    monkeypatch.setattr(FakeEngine, "facts", counted)
    (share,) = shares()
    ready = become_ready(controller, worker_thread, start_message(share))
    assert ready.buffer_limit == 249_500


def test_total_tokens_bound_the_pool_and_are_never_divided(
    controller, worker_thread, shares, start_message
) -> None:
    share = shares(dp_size=4, dp_attention=True, tokens=1_000)[3]
    ready = become_ready(controller, worker_thread, start_message(share))
    assert ready.capacity.pool_tokens == 1_000
    assert ready.capacity.request_slots == 500


def test_total_tokens_beyond_the_pool_are_cut_with_a_warning(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares(tokens=5_000, requests=4)
    ready = become_ready(
        controller, worker_thread, start_message(share, fake=FakeEngineOptions(pool_tokens=100))
    )
    assert ready.capacity.pool_tokens == 100
    assert "--max-total-tokens 5000" in ready.capacity.warnings[0]


@pytest.mark.parametrize(
    ("fake", "tokens", "states", "pool"),
    [
        (FakeEngineOptions(pool_tokens=500), None, 0, 500),
        (FakeEngineOptions(pool_tokens=500), 100, 0, 100),
        (FakeEngineOptions(pool_tokens=500, hybrid=True), 100, 2 * 4, 100),
        (FakeEngineOptions(pool_tokens=None, hybrid=True), 100, None, None),
    ],
    ids=["the pool", "asked tokens", "tokens and states", "no tokens"],
)
def test_the_budget_in_bytes_is_told_with_the_capacity(
    fake: FakeEngineOptions,
    tokens: int | None,
    states: int | None,
    pool: int | None,
    controller,
    worker_thread,
    shares,
    start_message,
) -> None:
    (share,) = shares(requests=2, tokens=tokens)
    capacity = become_ready(controller, worker_thread, start_message(share, fake=fake)).capacity
    assert capacity.pool_tokens == pool
    if states is None or pool is None:
        assert capacity.cache_nbytes is None
    else:
        nbytes = pool * KV_BYTES_PER_TOKEN + states * AUXILIARY_BYTES_PER_SLOT
        assert capacity.cache_nbytes == nbytes


def test_what_can_never_fit_is_refused_on_arrival(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares(requests=2, tokens=100)
    worker_thread()
    controller.receive_until(Hello)
    controller.send(start_message(share))
    controller.receive_until(Ready)
    controller.send(Submit(request_id=1, epoch=1, prompt_ids=(1,) * 90, max_tokens=12))
    assert controller.receive_until(Rejected).reason is RejectReason.TOO_LONG
    controller.send(Submit(request_id=2, epoch=1, prompt_ids=(1,) * 90, max_tokens=11))
    assert controller.receive_until(Finished).num_tokens == 11
    controller.send(Shutdown())


def test_a_shared_prompt_is_computed_once_and_a_flush_forgets_it(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares(requests=2)
    worker_thread()
    controller.receive_until(Hello)
    controller.send(start_message(share, fake=FakeEngineOptions(hybrid=True)))
    controller.receive_until(Ready)
    prompt = tuple(range(100))
    for request_id, cached in ((1, 0), (2, 99)):
        controller.send(Submit(request_id=request_id, epoch=1, prompt_ids=prompt, max_tokens=3))
        assert controller.receive_until(Prefilled).cached_tokens == cached
        controller.receive_until(Finished)
    controller.send(Flush(flush_id=5))
    flushed = controller.receive_until(Flushed)
    assert (flushed.flush_id, flushed.num_tokens) == (5, 102)
    controller.send(Submit(request_id=3, epoch=1, prompt_ids=prompt, max_tokens=3))
    assert controller.receive_until(Prefilled).cached_tokens == 0
    controller.send(Shutdown())


@pytest.mark.parametrize(("asked", "holds"), [(None, 8192), (512, 512), (8192, 8192)])
def test_a_shorter_context_than_the_models_can_be_asked_for(
    asked: int | None, holds: int, controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares()
    ready = become_ready(controller, worker_thread, start_message(share, context_length=asked))
    assert ready.context_length == holds


def test_a_longer_context_than_the_models_is_refused(
    controller, worker_thread, shares, start_message
) -> None:
    (share,) = shares()
    failed = fail(controller, worker_thread, start_message(share, context_length=8_193))
    assert failed.kind is FailureKind.CONFIG
    assert "--context-length 8193 exceeds the model's 8192" in failed.message


def test_phases_are_told_in_order_before_ready(
    controller, worker_thread, shares, start_message
) -> None:
    worker_thread()
    (share,) = shares()
    controller.receive_until(Hello)
    controller.send(start_message(share))
    phases = []
    while isinstance(message := controller.receive(), Heartbeat):
        phases.append(message.phase)
    assert phases == [WorkerPhase.LOADING, WorkerPhase.WARMING]
    assert isinstance(message, Ready)
    assert controller.receive_until(Heartbeat).phase is WorkerPhase.SERVING
    controller.send(Shutdown())


def test_shutdown_before_start_ends_the_worker(controller, worker_thread) -> None:
    ended = worker_thread()
    controller.receive_until(Hello)
    controller.send(Shutdown())
    assert ended.result(timeout=200.0) is ExitCode.OK


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_hundreds_of_requests_in_turn_never_run_short_of_auxiliary_slots(
    prefix_cache: bool, controller, worker_thread, shares, start_message
) -> None:
    ratio = 4 if prefix_cache else 1
    (share,) = shares(requests=2, auxiliary=2 * ratio)
    worker_thread()
    controller.receive_until(Hello)
    controller.send(
        start_message(
            share,
            fake=FakeEngineOptions(hybrid=True),
            prefix_cache=prefix_cache,
            heartbeat_interval_s=0.001,
        )
    )
    ready = controller.receive_until(Ready)
    assert (ready.capacity.request_slots, ready.capacity.auxiliary_slots) == (2, 2 * ratio)
    for request_id in range(300):
        controller.send(Submit(request_id=request_id, epoch=1, prompt_ids=(1, 2, 3), max_tokens=2))
        finished = controller.receive_until(Finished)
        assert (finished.request_id, finished.reason) == (request_id, FinishReason.LENGTH)
    while (heartbeat := controller.receive_until(Heartbeat)).running:
        pass
    # With the prefix cache the tree holds only the states: at the prompt's end and the
    # output's.
    assert heartbeat.auxiliary_used == (2 if prefix_cache else 0)
    assert heartbeat.reserved_tokens == 0
    controller.send(Shutdown())
