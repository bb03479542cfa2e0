"""A controller's whole surroundings in one thread: clock, wire, processes and workers, all fake.

Nothing happens by itself: tests run workers' loops, deliver messages and move the clock.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlx_dp.orchestrator.api import Ended, Granted, NewTokens, Started
from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.requests.response_stream import BufferedStream
from mlx_dp.orchestrator.control.state.request_table import RequestTable
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.options import HttpOptions, QueueOptions, ServeOptions, WorkerOptions
from mlx_dp.orchestrator.ports import GroupAddresses
from mlx_dp.proto.capacity.ownership import Limits, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down, EngineKind
from mlx_dp.proto.messages.events import Ready, Up
from mlx_dp.proto.wire.codec import decode_down, encode
from mlx_dp.proto.wire.controller_channel import NotConnectedError, PeerCongestedError
from tests.support.control.fake_worker import FakeWorker, ready

made: list[RequestTable | ControlCore] = []
"""The worlds of the present test; their invariants are checked when it ends."""


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
        self.readable: set[str] = set()
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
        """The generations for which addresses were requested."""
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
        self.readable.add(identity)

    def forget(self, identity: str) -> None:
        self.readable.discard(identity)

    def send(self, identity: str, message: Down) -> None:
        worker = next((each for each in self.workers if each.identity == identity), None)
        if worker is None or not worker.alive or identity in self.cut:
            raise NotConnectedError(f"{identity}: not connected")
        if identity in self.congested:
            raise PeerCongestedError(f"{identity}: full")
        worker.commands.append(decode_down(encode(message)))

    def drain(self) -> list[tuple[str, Up | ProtocolError]]:
        arrived = []
        while self.arrived:
            identity, event = self.arrived.popleft()
            if identity in self.readable:
                arrived.append((identity, event))
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

    # For tests.

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
        """Deliver all messages in flight, in both directions."""
        for worker in self.alive():
            worker.receive()
        self.core.on_arrival()
        self.core.check()

    def run_workers(self, times: int = 1) -> None:
        """Run every worker's loop once, and deliver everything."""
        for _ in range(times):
            for worker in self.alive():
                worker.run_once()
            self.core.on_arrival()
            self.core.check()

    def pass_time(self, seconds: float, *, heartbeats: bool = True) -> None:
        """Move the clock on in ticks, with heartbeats twice a second."""
        ticks = max(1, round(seconds / self.limits.tick_s))
        for tick in range(ticks):
            self.clock.now += self.limits.tick_s
            if heartbeats and tick % 5 == 0:
                for worker in self.alive():
                    worker.send_heartbeat()
            self.core.tick()
            self.core.check()

    def recover(self, seconds: float = 2.0) -> None:
        """Let restarts happen."""
        for _ in range(round(seconds / 0.1)):
            self.pass_time(0.1)
            self.greet()
            self.settle()


class Reader:
    """Reads a response stream without an event loop, up to its newest event."""

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
