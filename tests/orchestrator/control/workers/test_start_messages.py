"""The Start command of each worker, and warnings when a worker reports other weights."""

from dataclasses import replace

import pytest

from mlx_dp.orchestrator.control.workers.start_messages import StartMessages
from mlx_dp.proto.messages.group import DistributedBackend
from tests.support.control.control_world import World, serve_options
from tests.support.control.fake_worker import ready


def test_a_group_is_told_what_the_flags_say() -> None:
    options = serve_options(2, group=True)
    worker = replace(
        options.worker, distributed_backend=DistributedBackend.JACCL, shard_vocabulary=True
    )
    starts = StartMessages(replace(options, worker=worker), World())
    place = starts.start_for(1, 5).group
    assert place is not None
    assert (place.backend, place.shard_vocabulary) == (DistributedBackend.JACCL, True)
    assert (place.rank, place.size, place.generation) == (1, 2, 5)


def test_a_worker_gets_its_share_of_prompt_tokens_as_it_was_divided() -> None:
    options = serve_options(2, group=True)
    starts = StartMessages(options, World())
    assert starts.start_for(0, 0).chunked_prefill_size == options.worker.chunked_prefill_size


def test_a_group_without_addresses_is_our_bug() -> None:
    StartMessages(serve_options(2), None)
    with pytest.raises(AssertionError, match="needs addresses"):
        StartMessages(serve_options(2, group=True), None)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ((), None),
        ((1, 1), None),
        ((1, 2_000), "holds 1 bytes of weights, but 2,000 were planned"),
    ],
)
def test_weights_that_were_not_planned_are_told(planned: tuple[int, ...], said: str | None) -> None:
    starts = StartMessages(replace(serve_options(2), weights_nbytes=planned), None)
    assert starts.unplanned_weights(1, ready()) == said


def test_weights_that_were_not_planned_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    World(replace(serve_options(2), weights_nbytes=(1, 2_000))).bring_up()
    warnings = [record.message for record in caplog.records if "planned" in record.message]
    assert warnings == ["worker 1: holds 1 bytes of weights, but 2,000 were planned"]
