"""A controller's whole surroundings in one thread: clock, wire, processes and workers, all fake.

Nothing happens by itself: tests turn workers, deliver messages and move the clock.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_dp.orchestrator.api import Ended, Generation, Granted, NewTokens, Started
from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.options import HttpOptions, QueueOptions, ServeOptions, WorkerOptions
from mlx_dp.orchestrator.ports import GroupAddresses
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import Limits, OwnerCapacity, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.capacity.request_limits import next_tokens
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.protocol import (
    Abort,
    Accepted,
    Down,
    Drain,
    EngineKind,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    RejectReason,
    Shutdown,
    Start,
    Submit,
    TokenChunk,
    TokenLogprob,
    Tokens,
    Up,
    WorkerPhase,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.proto.wire.codec import decode_down, decode_up, encode
from mlx_dp.proto.wire.controller_channel import NotConnectedError, PeerCongestedError

VOCAB = 97
SHAPE = ModelShape(
    num_layers=2,
    attention_layers=2,
    auxiliary_layers=0,
    kv_bytes_per_token=64,
    auxiliary_bytes_per_slot=0,
    vocab_size=VOCAB,
    context_length=1000,
    weights_nbytes=1,
)


def ready(
    *,
    slots: int = 2,
    pool: int | None = 1000,
    context: int = 1000,
    memory_tokens: int | None = None,
) -> Ready:
    """``memory_tokens``: the budget in bytes, in tokens of what runs."""
    return Ready(
        capacity=OwnerCapacity(
            request_slots=slots,
            auxiliary_slots=0,
            pool_tokens=pool,
            cache_nbytes=None if memory_tokens is None else SHAPE.request_nbytes(memory_tokens),
        ),
        shape=SHAPE,
        context_length=context,
        device="fake",
        load_s=0.0,
    )


def generation(
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int | None = 4,
    *,
    seed: int = 0,
    rank: int | None = None,
    stop: tuple[int, ...] = (),
    salt: str = "",
) -> Generation:
    return Generation(
        prompt_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        params=SamplingParams(seed=seed),
        routed_dp_rank=rank,
        cache_salt=salt,
    )


def expected(generation: Generation, num_tokens: int) -> list[int]:
    """What any worker says to this request."""
    key = hash((generation.prompt_ids, generation.params.seed))
    return [(key + position * 7) % VOCAB for position in range(num_tokens)]


made: list[RequestTable | ControlCore] = []
"""What the present test has made; its invariants are checked when the test ends."""


def request_table(options: QueueOptions | None = None) -> RequestTable:
    """A table whose requests have no stream."""
    table = RequestTable(options or QueueOptions(), lambda entry, ended, now: None)
    made.append(table)
    return table


def serve_options(
    size: int = 2, *, group: bool = False, queue: QueueOptions | None = None
) -> ServeOptions:
    topology = resolve_topology(dp_size=size, tp_size=None, enable_dp_attention=group)
    return ServeOptions(
        http=HttpOptions(served_model_name="fake"),
        queue=queue or QueueOptions(),
        worker=WorkerOptions(engine=EngineKind.FAKE),
        ownership=divide(topology, Limits()),
    )


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    submit: Submit
    num_tokens: int
    prefilled: bool = False

    @property
    def held_tokens(self) -> int:
        return len(self.submit.prompt_ids) + self.num_tokens


def _next_tokens(submit: Submit) -> int:
    held = len(submit.prompt_ids) + len(submit.output_ids)
    return next_tokens(held, submit.max_tokens - len(submit.output_ids))


@dataclass
class FakeWorker:
    """One incarnation: a process, its end of the wire, and an engine that counts."""

    world: "World"
    index: int
    identity: str
    on_exit: Callable[[int], None]
    pid: int
    inbox: deque[Down] = field(default_factory=deque)
    running: dict[int, Running] = field(default_factory=dict)
    alive: bool = True
    stopped: bool = False
    serving: bool = False
    draining: bool = False
    step: int = 0
    start: Start | None = None
    signals: list[str] = field(default_factory=list)
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Salts and prompts whose KV it has."""

    @property
    def halted(self) -> bool:
        return self.stopped and self.alive

    def abort(self) -> None:
        self.signals.append("abort")
        if not self.world.deaf_to_abort:
            self.die(-6)

    def kill(self) -> None:
        self.signals.append("kill")
        self.die(-9)

    def die(self, status: int) -> None:
        if self.alive:
            self.alive = False
            self.on_exit(status)

    def say(self, fact: Up) -> None:
        if self.alive:
            self.world.arrived.append((self.identity, decode_up(encode(fact))))

    def hello(self) -> None:
        self.say(Hello(pid=self.pid))

    def receive(self) -> None:
        """Read everything that was sent to it."""
        while self.inbox and self.alive and not self.stopped:
            self._receive(self.inbox.popleft())

    def _receive(self, message: Down) -> None:
        match message:
            case Start():
                self.start = message
                self.world.started.append(self.index)
                if self.world.auto_ready:
                    self.become_ready()
            case Submit():
                self._submit(message)
            case Abort():
                running = self.running.get(message.request_id)
                if running is not None and running.submit.epoch <= message.epoch:
                    self.finish(message.request_id, FinishReason.ABORT)
            case Flush():
                freed = sum(len(prompt) for _, prompt in self.cached)
                self.cached.clear()
                self.say(Flushed(flush_id=message.flush_id, num_tokens=freed, nbytes=2 * freed))
            case Drain():
                self.draining = True
            case Shutdown():
                self.die(0)

    def become_ready(self) -> None:
        self.serving = True
        self.say(self.world.ready_of(self.index))

    def _submit(self, submit: Submit) -> None:
        capacity = self.world.ready_of(self.index).capacity
        assert submit.request_id not in self.running
        refused = None
        if self.draining:
            refused = RejectReason.DRAINING
        elif len(self.running) >= capacity.request_slots:
            refused = RejectReason.NO_SLOT
        elif self.running and not self._fits(_next_tokens(submit)):
            refused = RejectReason.NO_TOKENS
        if refused is not None:
            self.say(
                Rejected(
                    request_id=submit.request_id,
                    epoch=submit.epoch,
                    reason=refused,
                    message="full",
                )
            )
            return
        self.running[submit.request_id] = Running(submit, len(submit.output_ids))
        self.say(Accepted(request_id=submit.request_id, epoch=submit.epoch, slot=0))

    def turn(self) -> None:
        """One turn of the worker's loop: receive, then a token for everyone."""
        if not self.alive or self.stopped:
            return
        self.receive()
        if not self.alive or not self.running:
            return
        self.step += 1
        self._make_room()
        self._prefill()
        chunks = []
        for running in self.running.values():
            submit = running.submit
            whole = expected(
                generation(submit.prompt_ids, seed=submit.params.seed), running.num_tokens + 1
            )
            chunks.append(
                TokenChunk(
                    request_id=submit.request_id,
                    epoch=submit.epoch,
                    index=running.num_tokens,
                    ids=(whole[-1],),
                    logprobs=self._logprobs(running),
                )
            )
            running.num_tokens += 1
        self.say(Tokens(chunks=tuple(chunks)))
        for chunk in chunks:
            running = self.running[chunk.request_id]
            if chunk.ids[0] in running.submit.stop_token_ids:
                self.finish(chunk.request_id, FinishReason.STOP)
            elif running.num_tokens == running.submit.max_tokens:
                self.finish(chunk.request_id, FinishReason.LENGTH)

    @staticmethod
    def _logprobs(running: Running) -> tuple[TokenLogprob, ...]:
        """Another one at each position, when the request asks for them."""
        if running.submit.params.logprobs is None:
            return ()
        return (TokenLogprob(logprob=-float(running.num_tokens)),)

    def _make_room(self) -> None:
        """Give up the youngest until the next step fits, as a worker does; never the last one."""
        while len(self.running) > 1 and not self._fits(len(self.running)):
            self.preempt(next(reversed(self.running)))

    def _fits(self, num_tokens: int) -> bool:
        budget = self.world.ready_of(self.index).capacity.cache_nbytes
        return budget is None or SHAPE.request_nbytes(self.held_tokens + num_tokens) <= budget

    @property
    def held_tokens(self) -> int:
        return sum(running.held_tokens for running in self.running.values())

    def preempt(self, request_id: int) -> None:
        running = self.running.pop(request_id)
        self.say(
            Preempted(
                request_id=request_id,
                epoch=running.submit.epoch,
                num_tokens=running.num_tokens,
            )
        )

    def _prefill(self) -> None:
        for request_id, running in self.running.items():
            if running.prefilled:
                continue
            running.prefilled = True
            submit = running.submit
            key = (submit.cache_salt, submit.prompt_ids)
            cached = len(submit.prompt_ids) - 1 if key in self.cached else 0
            self.cached.add(key)
            self.say(Prefilled(request_id=request_id, epoch=submit.epoch, cached_tokens=cached))

    def finish(self, request_id: int, reason: FinishReason) -> None:
        running = self.running.pop(request_id)
        self.say(
            Finished(
                request_id=request_id,
                epoch=running.submit.epoch,
                reason=reason,
                num_tokens=running.num_tokens,
            )
        )

    def lose_peer(self, rank: int | None) -> None:
        self.say(Failed(kind=FailureKind.PEER_LOST, message="no answer", lost_rank=rank))

    def beat(self, **changes: Any) -> None:
        if self.stopped:
            return
        beat = Heartbeat(
            phase=WorkerPhase.SERVING if self.serving else WorkerPhase.LOADING,
            step=self.step,
            running=len(self.running),
            prefilling=0,
            used_tokens=0,
            reserved_tokens=0,
            auxiliary_used=0,
            rss_nbytes=1,
            device_nbytes=2,
        )
        self.say(replace(beat, **changes))

    def fail(self, kind: FailureKind, message: str = "no good", status: int = 3) -> None:
        self.say(Failed(kind=kind, message=message))
        self.die(status)


class World:
    """Transport and launcher of one controller core, and the workers behind them."""

    def __init__(
        self,
        options: ServeOptions | None = None,
        *,
        limits: ControlLimits | None = None,
        seed: int = 0,
    ) -> None:
        self.clock = Clock()
        self.arrived: deque[tuple[str, Up | ProtocolError]] = deque()
        self.heard: set[str] = set()
        self.unknown_frames = 0
        self.workers: list[FakeWorker] = []
        self.started: list[int] = []
        self.auto_ready = True
        self.deaf_to_abort = False
        self.congested: set[str] = set()
        self.cut: set[str] = set()
        self.no_processes = False
        self.no_addresses = False
        self.meetings: list[int] = []
        """The generations for which addresses were asked."""
        self.readies: dict[int, Ready] = {}
        self.limits = limits or ControlLimits()
        self.core = ControlCore(
            options or serve_options(),
            ControlPorts(self, self, self),
            self.limits,
            self.clock,
            random.Random(seed),
            lambda delay_s: None,
        )
        made.append(self.core)

    # Transport.

    endpoint = "fake://"

    def expect(self, identity: str) -> None:
        self.heard.add(identity)

    def forget(self, identity: str) -> None:
        self.heard.discard(identity)

    def send(self, identity: str, message: Down) -> None:
        worker = next((each for each in self.workers if each.identity == identity), None)
        if worker is None or not worker.alive or identity in self.cut:
            raise NotConnectedError(f"{identity}: not connected")
        if identity in self.congested:
            raise PeerCongestedError(f"{identity}: full")
        worker.inbox.append(decode_down(encode(message)))

    def drain(self) -> list[tuple[str, Up | ProtocolError]]:
        arrived = []
        while self.arrived:
            identity, fact = self.arrived.popleft()
            if identity in self.heard:
                arrived.append((identity, fact))
            else:
                self.unknown_frames += 1
        return arrived

    def attach(self, loop: object, on_arrival: Callable[[], None]) -> None:
        self.on_arrival = on_arrival

    def close(self) -> None:
        self.arrived.clear()

    # Launcher.

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> FakeWorker:
        assert endpoint == self.endpoint
        if self.no_processes:
            raise OSError("no more processes")
        worker = FakeWorker(self, index, identity, on_exit, pid=1000 + len(self.workers))
        self.workers.append(worker)
        return worker

    # Addresses.

    def fresh(self, size: int, generation: int) -> GroupAddresses:
        if self.no_addresses:
            raise OSError("no more addresses")
        self.meetings.append(generation)
        port = 10 * len(self.meetings)
        return GroupAddresses(
            addresses=tuple(f"host:{port + rank}" for rank in range(size)),
            peers=tuple(f"ipc://{port}-{rank}" for rank in range(size)),
        )

    # What tests do.

    def ready_of(self, index: int) -> Ready:
        return self.readies.get(index, ready())

    def worker(self, index: int) -> FakeWorker:
        """The newest incarnation."""
        return next(each for each in reversed(self.workers) if each.index == index)

    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.alive]

    def bring_up(self) -> "World":
        """Start everyone."""
        self.core.begin()
        for _ in range(len(self.core.supervisor.workers)):
            self.greet()
            self.settle()
        return self

    def greet(self) -> None:
        for worker in self.alive():
            if self.core.supervisor.workers[worker.index].identity == worker.identity:
                record = self.core.supervisor.workers[worker.index]
                if not record.hello_received and not worker.serving:
                    worker.hello()
        self.core.on_arrival()

    def settle(self) -> None:
        """Deliver what is under way in both directions."""
        for worker in self.alive():
            worker.receive()
        self.core.on_arrival()
        self.core.check()

    def turn(self, times: int = 1) -> None:
        """Every worker's loop turns, and everything is delivered."""
        for _ in range(times):
            for worker in self.alive():
                worker.turn()
            self.core.on_arrival()
            self.core.check()

    def pass_time(self, seconds: float, *, beats: bool = True) -> None:
        """Move the clock on in ticks, with heartbeats twice a second."""
        ticks = max(1, round(seconds / self.limits.tick_s))
        for tick in range(ticks):
            self.clock.now += self.limits.tick_s
            if beats and tick % 5 == 0:
                for worker in self.alive():
                    worker.beat()
            self.core.tick()
            self.core.check()

    def recover(self, seconds: float = 2.0) -> None:
        """Let restarts happen."""
        for _ in range(round(seconds / 0.1)):
            self.pass_time(0.1)
            self.greet()
            self.settle()


class Reader:
    """Reads an answer without an event loop, as far as it has come."""

    def __init__(self, answer: BufferedStream) -> None:
        self.answer = answer
        self.ids: list[int] = []
        self.grants: list[Granted] = []
        self.starts: list[Started] = []
        self.ended: Ended | None = None

    def read(self) -> "Reader":
        while (event := self.answer.poll()) is not None:
            assert self.ended is None, "an event after the end"
            match event:
                case Granted():
                    self.grants.append(event)
                case Started():
                    self.starts.append(event)
                case NewTokens(ids=ids):
                    self.ids += ids
                case Ended():
                    self.ended = event
        return self
