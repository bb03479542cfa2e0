"""A worker's real start-up, scheduler, loop and engine in this process, without a socket."""

import gc
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dp.proto.capacity.ownership import Limits, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.messages.commands import Abort, Down, EngineKind, Flush, Start, Submit
from mlx_dp.proto.messages.events import Failed, Finished, Flushed, Preempted, Rejected, Tokens, Up
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker import startup
from mlx_dp.worker.channel import BufferedChannel
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.engine.mlx_engine import MlxEngine
from mlx_dp.worker.heartbeat import StartHeartbeats
from mlx_dp.worker.loop import WorkerLoop
from scripts.benchmarks.engine.side import PATIENCE_STEPS, Emitted
from tests.support.worker.fake_channel import FakeChannel, VirtualTime

GREEDY = SamplingParams(temperature=0.0)


def start_message(
    directory: Path,
    limits: Limits,
    *,
    chunk: int,
    memory_nbytes: int | None,
    prefix_cache: bool,
    group: GroupPlace | None = None,
) -> Start:
    """Return the Start of a single worker, or of a rank of ``group``.

    The limits are divided as the controller divides them.
    """
    size = 1 if group is None else group.size
    topology = resolve_topology(dp_size=size, tp_size=None, enable_dp_attention=size > 1)
    return Start(
        engine=EngineKind.MLX,
        model_path=str(directory),
        share=divide(topology, limits).slices[0 if group is None else group.rank],
        memory_nbytes=memory_nbytes,
        context_length=None,
        chunked_prefill_size=chunk,
        prefix_cache=prefix_cache,
        heartbeat_interval_s=60.0,
        group=group,
    )


class LocalWorker:
    """A loaded and warmed-up worker; ``turn`` runs its loop once."""

    def __init__(self, start: Start) -> None:
        self._channel = FakeChannel(VirtualTime())
        held = BufferedChannel(self._channel)
        heartbeats = StartHeartbeats(held, start.heartbeat_interval_s, time.monotonic)
        started = startup._bring_up(start, heartbeats, time.monotonic)
        self.engine: Engine = started.engine
        self.capacity = started.capacity
        self.loop: WorkerLoop = startup._loop(start, started, held, time.monotonic)
        self._channel.take()

    @property
    def model(self) -> Any:
        """The model that the engine has loaded."""
        engine = self.engine
        assert isinstance(engine, MlxEngine), engine
        return engine._loaded.model

    @property
    def accounted_nbytes(self) -> int:
        """Bytes that the owner's budget counts: held and promised memory."""
        return self.loop._scheduler._room.accounted_nbytes

    def send(self, command: Down) -> None:
        """Queue a command for the next run of the loop."""
        self._channel.commands.append(command)

    def run_once(self) -> list[Up]:
        """Run the loop once; return the worker's events."""
        ended = self.loop.run_once()
        assert ended is None, ended
        return self._channel.take()

    def check(self) -> None:
        """Assert that the scheduler, the prefix tree and the pools are consistent."""
        self.loop._scheduler.check()


class OurBatch:
    """A worker as one side of a comparison."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker
        self._running: set[int] = set()
        self._next_id = 1
        self._flushed = 0

    @property
    def name(self) -> str:
        return "mlx-dp"

    def submit(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        request = self._next_id
        self._next_id += 1
        self.worker.send(
            Submit(
                request_id=request,
                epoch=1,
                prompt_ids=tuple(prompt_ids),
                max_tokens=max_tokens,
                params=GREEDY,
            )
        )
        self._running.add(request)
        return request

    def cancel(self, requests: Collection[int]) -> None:
        for request in requests:
            self.worker.send(Abort(request_id=request, epoch=1))

    def step(self) -> list[Emitted]:
        tokens: dict[int, list[int]] = {}
        ended: set[int] = set()
        for message in self.worker.run_once():
            match message:
                case Tokens(chunks=chunks):
                    for chunk in chunks:
                        tokens.setdefault(chunk.request_id, []).extend(chunk.ids)
                case Finished(request_id=request):
                    ended.add(request)
                case Flushed(flush_id=flush):
                    self._flushed = flush
                case Rejected() | Preempted() | Failed():
                    raise RuntimeError(f"the measurement does not fit into the worker: {message}")
                case _:
                    pass
        self._running -= ended
        return [
            Emitted(request, token, request in ended and index == len(ids) - 1)
            for request, ids in tokens.items()
            for index, token in enumerate(ids)
        ]

    def settle(self) -> None:
        mx.synchronize()

    def clear(self) -> None:
        self.cancel(self._running)
        flush = self._next_id
        self._next_id += 1
        for _ in range(PATIENCE_STEPS):
            if not self._running and not self.worker.engine.busy:
                break
            self.step()
        self.worker.send(Flush(flush_id=flush))
        self.step()
        assert self._flushed == flush, "the worker does not answer Flush"
        self.settle()
        gc.collect()
        mx.clear_cache()
