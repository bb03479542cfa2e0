"""One rank as a process, for model after model: ``python rank_process.py``.

Its group is formed once, since MLX forms one per process. Jobs come on stdin, one per line;
``done`` on stdout reports that this rank's requests have ended, ``stop`` on stdin that all ranks'
have; then comes the report.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from queue import Queue
from typing import Any

import msgspec
import pytest
from mlx.utils import tree_flatten

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.events import FailureKind
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.worker.engine import mlx_engine
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.lockstep import rank_model
from mlx_dp.worker.lockstep.lockstep import Lockstep
from mlx_dp.worker.shards.sharded_block import ShardedBlock
from mlx_dp.worker.startup import run_worker
from tests.support.conformance.rank_client import RankClient
from tests.support.conformance.rank_report import RankJob, RankReport
from tests.support.conformance.scenario import Ask, conversation, crowd, sample, short
from tests.support.worker.worker_starts import mlx_start, no_warm_up

MEMORY_NBYTES = 2**30
REQUESTS = 16
AT_ONCE = 4
LATER = 25
"""Loop runs by which each rank's clients come later than those of the rank before."""


class CountedLockstep(Lockstep):
    """Counts its passes."""

    passes = 0
    idle_passes = 0

    def begin(self, tokens: int, answered: int) -> None:
        super().begin(tokens, answered)
        CountedLockstep.passes += 1
        CountedLockstep.idle_passes += tokens == 0


class Commands:
    """Lines of stdin, which arrive while the worker works."""

    def __init__(self) -> None:
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip())
        self._lines.put("")

    def jobs(self) -> Iterator[RankJob]:
        while line := self._lines.get():
            yield RankJob.decode(line)

    def stopped(self) -> bool:
        """All ranks' requests have ended."""
        if self._lines.empty():
            return False
        self.await_stop()
        return True

    def await_stop(self) -> None:
        line = self._lines.get()
        assert line in ("stop", ""), line


def asks(scenario: str, rank: int) -> list[Ask]:
    """Each rank's clients send other requests, at other times."""
    rng = random.Random(rank)
    mixed = conversation if rank % 2 else crowd
    parts = {"short": short, "sample": sample, "mixed": mixed}[scenario](rng)
    return [replace(ask, turn=ask.turn + rank * LATER, cached=0) for ask in parts]


def serve(job: RankJob, commands: Commands) -> RankReport:
    place = msgspec.convert(job.place, GroupPlace)
    start = mlx_start(
        job.directory, requests=REQUESTS, chunk=job.chunk, memory_nbytes=MEMORY_NBYTES
    )
    said: list[bool] = []

    def all_done() -> bool:
        if not said:
            print("done", flush=True)
            said.append(True)
        return commands.stopped()

    client = RankClient(
        replace(start, group=place),
        asks(job.scenario, place.rank),
        at_once=AT_ONCE,
        all_done=all_done,
    )
    seen: list[tuple[LoadedModel, BatchForm]] = []
    choose_form = mlx_engine.choose_form
    CountedLockstep.passes = CountedLockstep.idle_passes = 0

    def choose(loaded: LoadedModel) -> BatchForm:
        seen.append((loaded, choose_form(loaded)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_engine, "choose_form", choose)
        patch.setattr(rank_model, "Lockstep", CountedLockstep)
        with nullcontext() if job.warm_up else no_warm_up():
            code = run_worker(client, clock=client.clock)
    if client.failed is not None:
        assert client.failed.kind is FailureKind.UNSUPPORTED_MODEL, client.failed
        print("done", flush=True)
        return RankReport(refusal=client.failed.message)
    assert code is ExitCode.OK and client.ready is not None and client.idle is not None
    (loaded, form), idle = seen[-1], client.idle
    blocks = [m for _, m in loaded.model.named_modules() if isinstance(m, ShardedBlock)]
    return RankReport(
        form=str(form),
        answers=[(list(a.prompt), a.ids) for a in client.answers],
        held_nbytes=nbytes(loaded.model),
        told_nbytes=client.ready.shape.weights_nbytes,
        block_nbytes=sum(nbytes(block) for block in blocks),
        blocks=len(blocks),
        most_together=client.most_together,
        passes=CountedLockstep.passes,
        idle_passes=CountedLockstep.idle_passes,
        leftovers=(idle.running, idle.cached_tokens, idle.cached_nbytes, idle.auxiliary_used),
    )


def nbytes(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def main() -> None:
    commands = Commands()
    for job in commands.jobs():
        report = serve(job, commands)
        if report.refusal:
            commands.await_stop()
        print(report.encode(), flush=True)


if __name__ == "__main__":
    main()
