"""Runs a scenario through a whole worker: the start, the loop, the scheduler and the engine."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.proto.capacity import request_limits as admission
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind
from mlx_dp.worker.engine import mlx_engine
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.startup import run_worker
from tests.support.conformance.client import Client
from tests.support.conformance.scenario import Ask
from tests.support.worker.worker_starts import mlx_start, no_warm_up

MEMORY_NBYTES = 2**30
AT_ONCE = 4
"""Requests that the client holds open, so that slots are used again."""
PLENTY = 16
"""Request slots, which bring snapshots for more prefixes than there are."""
SCARCE_TOKENS = 900
"""Two or three rows; the longest request takes the space of two."""
NEXT_ANSWER_TOKENS = 2
"""So few that rows outgrow their space, as those of long responses do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """``scarce``: tokens and snapshots for hardly more than the longest request."""

    chunk: int
    prefix_cache: bool
    scarce: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """``form``: how the engine batches the model; None: it was refused, for ``refusal``."""

    client: Client
    form: BatchForm | None
    refusal: str = ""


def serve(
    directory: Path, asks: Sequence[Ask], service: Service, *, warm_up: bool = True
) -> Served:
    """Start a worker on the model, and let it serve the scenario."""
    requests = AT_ONCE if service.scarce else PLENTY
    start = mlx_start(
        directory, requests=requests, chunk=service.chunk, memory_nbytes=MEMORY_NBYTES
    )
    tokens = SCARCE_TOKENS if service.scarce else None
    start = replace(
        start,
        prefix_cache=service.prefix_cache,
        share=replace(start.share, max_total_tokens=tokens),
    )
    client = Client(start, asks, at_once=AT_ONCE)
    forms: list[BatchForm] = []
    choose_form = mlx_engine.choose_form

    def choose(loaded: LoadedModel) -> BatchForm:
        forms.append(choose_form(loaded))
        return forms[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "NEXT_ANSWER_TOKENS", NEXT_ANSWER_TOKENS)
        patch.setattr(mlx_engine, "choose_form", choose)
        with nullcontext() if warm_up else no_warm_up():
            code = run_worker(client, clock=client.clock)
    if client.failed is not None:
        assert client.failed.kind is FailureKind.UNSUPPORTED_MODEL, client.failed
        return Served(client=client, form=None, refusal=client.failed.message)
    assert code is ExitCode.OK
    return Served(client=client, form=forms[-1])
