"""Processes and messages together."""

import logging
from dataclasses import replace

import pytest

from mlx_dp.proto.messages.batching import Batching
from tests.support.control.control_world import World
from tests.support.control.fake_worker import FakeWorker, ready


def one_loading() -> tuple[World, FakeWorker]:
    """A service whose first worker loads."""
    world = World()
    world.auto_ready = False
    world.core.begin()
    world.greet()
    world.settle()
    [worker] = world.alive()
    return world, worker


def test_a_worker_that_is_gone_before_its_ready_is_read_gets_no_request() -> None:
    world, worker = one_loading()
    worker.become_ready()
    worker.die(-9)
    world.core.on_arrival()
    owner = world.core.ranks.get(worker.index)
    assert owner is not None and not owner.takes_requests


def test_at_the_stop_a_worker_that_loads_is_killed_and_one_that_serves_told_by_message() -> None:
    world, serving = one_loading()
    serving.become_ready()
    world.core.on_arrival()
    world.greet()
    world.settle()
    loading = next(worker for worker in world.alive() if worker is not serving)
    world.core.stop()
    assert loading.signals == ["kill"]
    assert serving.signals == []
    serving.receive()
    assert world.alive() == []


def test_how_a_worker_batches_is_on_its_ready_line_and_why_not_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.readies[0] = replace(ready(), batching=Batching.SEVERAL_SLABS)
    world.readies[1] = replace(
        ready(), batching=Batching.ONE_BY_ONE, unbatched_reason="this model rounds by 0.3"
    )
    with caplog.at_level(logging.INFO):
        world.bring_up()
    lines = [one.message for one in caplog.records if ": ready, " in one.message]
    assert [line.rsplit(", ", 1)[1] for line in lines] == [
        "batching several_slabs",
        "batching one_by_one",
    ]
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warnings == ["worker 1: requests run one by one: this model rounds by 0.3"]
    core = world.core
    assert [
        (worker.batching, worker.unbatched_reason) for worker in core.views.workers(world.clock.now)
    ] == [
        (Batching.SEVERAL_SLABS, ""),
        (Batching.ONE_BY_ONE, "this model rounds by 0.3"),
    ]
    assert [owner.batching for owner in core.views.owners()] == [
        Batching.SEVERAL_SLABS,
        Batching.ONE_BY_ONE,
    ]


def test_the_ready_line_of_an_engine_without_a_model_has_no_form_of_a_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.INFO):
        world.bring_up()
    lines = [one.message for one in caplog.records if ": ready, " in one.message]
    assert len(lines) == 2
    assert all(line.endswith(" KV tokens") for line in lines), lines
