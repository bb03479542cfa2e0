"""The start of a worker: Hello, Start, load, capacity, warm-up, Ready."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, assert_never

from mlx_dp.proto.capacity.model_shape import resolve_context_length
from mlx_dp.proto.capacity.ownership import OwnerCapacity, resolve_capacity
from mlx_dp.proto.capacity.token_pool import cache_nbytes
from mlx_dp.proto.descriptor_limit import check_descriptor_limit
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import EngineKind, Shutdown, Start
from mlx_dp.proto.messages.events import FailureKind, Hello, Ready, WorkerPhase
from mlx_dp.worker.channel import BufferedChannel, Channel, ShutdownRequestedError
from mlx_dp.worker.contract.engine import Engine, EngineFacts
from mlx_dp.worker.contract.failure import starting_failure
from mlx_dp.worker.fake.engine import FakeEngine
from mlx_dp.worker.heartbeat import HeartbeatSchedule, StartHeartbeats
from mlx_dp.worker.host_overrides import HostOverrides
from mlx_dp.worker.loop import WorkerLoop
from mlx_dp.worker.scheduling.chunk_budget import ChunkBudget
from mlx_dp.worker.scheduling.scheduler import Scheduler
from mlx_dp.worker.warm_up import warm_up

_START_POLL_S: Final = 60.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorker:
    """A worker that can send Ready. ``context_length`` is the limit for requests."""

    engine: Engine
    capacity: OwnerCapacity
    context_length: int


def run_worker(
    channel: Channel,
    overrides: HostOverrides | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ExitCode:
    """Run a worker, from Hello to its exit."""
    channel.send(Hello(pid=os.getpid()))
    start = _await_start(channel)
    if start is None:
        return ExitCode.OK
    if overrides is not None:
        start = overrides.apply(start)
    began_at = clock()
    # From here on the start may wait for peers; it reads commands meanwhile.
    channel = BufferedChannel(channel)
    try:
        started = _bring_up(
            start, StartHeartbeats(channel, start.heartbeat_interval_s, clock), clock
        )
    except ShutdownRequestedError:
        return ExitCode.OK
    except Exception as error:
        failed = starting_failure(error)
        if failed.kind is FailureKind.INTERNAL or isinstance(error, ImportError):
            _logger.exception("the start failed")
        channel.send(failed)
        return ExitCode[failed.kind.name]
    facts = started.engine.facts
    channel.send(
        Ready(
            capacity=started.capacity,
            shape=facts.shape,
            context_length=started.context_length,
            device=facts.device,
            load_s=clock() - began_at,
            batching=facts.batching,
            unbatched_reason=facts.unbatched_reason,
            buffer_limit=facts.buffer_limit,
        )
    )
    code = _loop(start, started, channel, clock).run()
    if code is ExitCode.OK:
        # After a failure the device is left alone: the process ends anyway.
        started.engine.close()
    return code


def _await_start(channel: Channel) -> Start | None:
    """Wait for Start without a time limit: the parent watch ends orphans."""
    while True:
        for message in channel.drain():
            match message:
                case Start():
                    return message
                case Shutdown():
                    return None
                case _:
                    _logger.warning("ignored a %s before Start", message.tag)
        channel.wait(_START_POLL_S)


def _bring_up(
    start: Start, heartbeats: StartHeartbeats, clock: Callable[[], float]
) -> LoadedWorker:
    engine = _load(start, heartbeats, clock)
    facts = engine.facts
    capacity, context_length = _resolve(start, facts)
    engine.open(capacity)
    heartbeats.enter(WorkerPhase.WARMING)
    warm_up(
        engine,
        capacity,
        context_length=context_length,
        chunk_tokens=start.chunked_prefill_size,
        clock=clock,
    )
    return LoadedWorker(engine=engine, capacity=capacity, context_length=context_length)


def _load(start: Start, heartbeats: StartHeartbeats, clock: Callable[[], float]) -> Engine:
    match start.engine:
        case EngineKind.FAKE:
            heartbeats.enter(WorkerPhase.LOADING)
            return FakeEngine.load(
                start.fake, clock=clock, sleep=time.sleep, prefix_cache=start.prefix_cache
            )
        case EngineKind.MLX:
            check_descriptor_limit()
            # A worker with the fake engine never loads MLX.
            from mlx_dp.worker.engine.mlx_engine import MlxEngine

            return MlxEngine.load(start, heartbeats)
        case _:
            assert_never(start.engine)


def _resolve(start: Start, facts: EngineFacts) -> tuple[OwnerCapacity, int]:
    """Return this owner's capacity, and the context length for requests."""
    warnings: tuple[str, ...] = ()
    pool_tokens, asked = facts.pool_tokens, start.share.max_total_tokens
    if pool_tokens is not None and asked is not None:
        if asked > pool_tokens:
            warnings = (
                f"--max-total-tokens {asked} is more than fits: one worker has room for "
                f"{pool_tokens} KV tokens",
            )
        pool_tokens = min(pool_tokens, asked)
    context_length = resolve_context_length(start.context_length, facts.shape.context_length)
    capacity = resolve_capacity(
        start.share,
        pool_tokens=pool_tokens,
        hybrid=facts.shape.hybrid,
        prefix_cache=start.prefix_cache,
    )
    nbytes = cache_nbytes(
        start.memory_nbytes, facts.shape, start.share, capacity, prefix_cache=start.prefix_cache
    )
    warnings = (*capacity.warnings, *warnings)
    return replace(capacity, cache_nbytes=nbytes, warnings=warnings), context_length


def _loop(
    start: Start, started: LoadedWorker, channel: Channel, clock: Callable[[], float]
) -> WorkerLoop:
    return WorkerLoop(
        channel,
        started.engine,
        Scheduler(started.capacity, started.engine, started.context_length),
        ChunkBudget(start.chunked_prefill_size),
        HeartbeatSchedule(start.heartbeat_interval_s),
        clock,
    )
