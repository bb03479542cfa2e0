"""A controller's end of the wire, and workers at the other: in this process, or in their own."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain, count
from typing import TypeVar

import pytest
import zmq

from mlx_dp.proto.capacity.ownership import Limits, OwnerSlice, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Down, EngineKind, FakeEngineOptions, Start
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.wire.codec import decode_up, encode
from mlx_dp.proto.wire.worker_channel import WorkerChannel
from mlx_dp.worker.startup import run_worker

DEADLINE_S = 200.0
_Kind = TypeVar("_Kind", bound=Up)


class ControllerEnd:
    """A ROUTER that sends a test's commands, and never waits without a deadline."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def send(self, message: Down) -> None:
        """Send to the worker of the last received event."""
        self.send_frames(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart([self.identity, *frames])

    def receive(self) -> Up:
        assert self._socket.poll(round(DEADLINE_S * 1000)), "no message in time"
        self.identity, frame = self._socket.recv_multipart()
        return decode_up(frame)

    def receive_until(self, kind: type[_Kind]) -> _Kind:
        """Skip other events, except those that end a worker."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert message.tag != "failed", message

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def controller() -> Iterator[ControllerEnd]:
    end = ControllerEnd()
    yield end
    end.close()


@pytest.fixture
def worker_thread(controller: ControllerEnd) -> Iterator[Callable[[], Future[ExitCode]]]:
    """Run the real start-up and loop of a worker in a thread, over a real channel."""
    incarnations = count()
    with ExitStack() as stack:

        def start() -> Future[ExitCode]:
            identity = f"w0-{next(incarnations)}"
            ended: Future[ExitCode] = Future()

            def serve() -> None:
                channel = WorkerChannel(controller.endpoint, identity)
                try:
                    ended.set_result(run_worker(channel))
                except BaseException as error:
                    ended.set_exception(error)
                finally:
                    channel.close(linger_s=2.0)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, DEADLINE_S)
            return ended

        yield start


@pytest.fixture
def worker_process(controller: ControllerEnd) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``python -m mlx_dp.worker serve`` as the controller does."""
    with ExitStack() as stack:

        def start(identity: str = "w0-test") -> subprocess.Popen[str]:
            read_end, write_end = os.pipe()
            stack.callback(os.close, write_end)
            arguments = {
                "--endpoint": controller.endpoint,
                "--identity": identity,
                "--parent-pid": str(os.getpid()),
                "--death-fd": str(read_end),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "mlx_dp.worker", "serve", *chain(*arguments.items())],
                pass_fds=(read_end,),
                stderr=subprocess.PIPE,
                text=True,
            )
            os.close(read_end)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def shares() -> Callable[..., tuple[OwnerSlice, ...]]:
    """The slices that the controller computes from the flags."""

    def compute(
        *,
        dp_size: int = 1,
        dp_attention: bool = False,
        requests: int | None = None,
        auxiliary: int | None = None,
        tokens: int | None = None,
    ) -> tuple[OwnerSlice, ...]:
        topology = resolve_topology(dp_size=dp_size, tp_size=None, enable_dp_attention=dp_attention)
        limits = Limits(
            max_running_requests=requests,
            max_mamba_cache_size=auxiliary,
            max_total_tokens=tokens,
        )
        return divide(topology, limits).slices

    return compute


@pytest.fixture
def start_message() -> Callable[..., Start]:
    """A ``Start`` for the fake engine."""

    def make(
        share: OwnerSlice,
        *,
        prefix_cache: bool = True,
        fake: FakeEngineOptions | None = None,
        context_length: int | None = None,
        heartbeat_interval_s: float = 0.5,
    ) -> Start:
        return Start(
            engine=EngineKind.FAKE,
            model_path="",
            share=share,
            memory_nbytes=None,
            context_length=context_length,
            chunked_prefill_size=512,
            prefix_cache=prefix_cache,
            heartbeat_interval_s=heartbeat_interval_s,
            fake=fake or FakeEngineOptions(),
        )

    return make
