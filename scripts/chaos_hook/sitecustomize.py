"""Faults that only come from inside a process. Python imports this from the path of a service
under trial, and of no other: production code has no place where a fault could be asked for.

The folder of this file holds the orders. ``boot-N`` has the exit status with which worker N ends
before it has begun. ``poison`` makes workers die of requests with POISON_SEED. On SIGUSR2 a worker
does what the file named by its pid says.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

ORDERS: Final = Path(__file__).resolve().parent
POISON_SEED: Final = 666_666
LEAVES_S: Final = 0.03
"""How long the I/O thread may take to put a message on its way, before the process dies."""
SLOW_TURN_S: Final = 0.005
GARBLED: Final = b"\xc1 garbled"
"""No msgpack begins with this byte."""


def _hang() -> NoReturn:
    while True:
        pass


def _slow(factor: float) -> None:
    """Let this process work for a moment, and sleep for ``factor`` moments, in turns."""
    if factor <= 1.0:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return

    def pause(_signal: int, _frame: FrameType | None) -> None:
        time.sleep(SLOW_TURN_S * (factor - 1.0))
        signal.setitimer(signal.ITIMER_REAL, SLOW_TURN_S)

    signal.signal(signal.SIGALRM, pause)
    signal.setitimer(signal.ITIMER_REAL, SLOW_TURN_S)


def _fill_memory() -> None:
    """Take memory until the system refuses; the error then comes up in the decode loop."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, resource.RLIM_INFINITY))
    held: list[bytearray] = []
    while True:
        held.append(bytearray(2**24))


def _die_at(tag: str, *, before: bool) -> None:
    """Be killed when a message with this tag is sent: before it leaves, or after."""

    def dying(send: Callable[[Any, Any], None], channel: Any, message: Any) -> None:
        if message.tag != tag:
            send(channel, message)
            return
        if not before:
            send(channel, message)
        time.sleep(LEAVES_S)
        os.kill(os.getpid(), signal.SIGKILL)

    _wrap_send(dying)


def _garble() -> None:
    """Send one frame that is none, ahead of the next message, and go on as if nothing were."""
    left = [GARBLED]

    def garbling(send: Callable[[Any, Any], None], channel: Any, message: Any) -> None:
        if left:
            channel._backlog.append(left.pop())
        send(channel, message)

    _wrap_send(garbling)


def _wrap_send(wrapper: Callable[[Callable[[Any, Any], None], Any, Any], None]) -> None:
    from mlx_dp.proto.worker_channel import WorkerChannel

    send = WorkerChannel.send

    def wrapped(self: WorkerChannel, message: Any) -> None:
        wrapper(send, self, message)

    WorkerChannel.send = wrapped  # type: ignore[method-assign]


def _die_of_poison() -> None:
    from mlx_dp.proto.messages import Accepted, Down, Submit
    from mlx_dp.proto.worker_channel import WorkerChannel

    poison: set[int] = set()
    drain = WorkerChannel.drain

    def drained(self: WorkerChannel) -> list[Down]:
        messages = drain(self)
        for message in messages:
            if isinstance(message, Submit) and message.params.seed == POISON_SEED:
                poison.add(message.request_id)
        return messages

    def swallowed(send: Callable[[Any, Any], None], channel: Any, message: Any) -> None:
        send(channel, message)
        if isinstance(message, Accepted) and message.request_id in poison:
            time.sleep(LEAVES_S)
            os.kill(os.getpid(), signal.SIGSEGV)

    WorkerChannel.drain = drained  # type: ignore[method-assign]
    _wrap_send(swallowed)


def _obey(_signal: int, _frame: FrameType | None) -> None:
    order, *arguments = (ORDERS / str(os.getpid())).read_text().split()
    match order:
        case "hang":
            _hang()
        case "slow":
            _slow(float(arguments[0]))
        case "exit":
            os._exit(int(arguments[0]))
        case "fill-memory":
            _fill_memory()
        case "garble":
            _garble()
        case "die-before" | "die-after":
            _die_at(arguments[0], before=order == "die-before")
        case _:
            raise ValueError(f"unknown order {order!r}")


def _arm() -> None:
    identity = sys.orig_argv[sys.orig_argv.index("--identity") + 1]
    boot = ORDERS / f"boot-{identity.partition('-')[0].removeprefix('w')}"
    if boot.exists():
        os._exit(int(boot.read_text()))
    if (ORDERS / "poison").exists():
        _die_of_poison()
    signal.signal(signal.SIGUSR2, _obey)


if "mlx_dp.worker" in sys.orig_argv and "--identity" in sys.orig_argv:
    _arm()
