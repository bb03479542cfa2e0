"""Faults that only a process can inject into itself.

Python imports this module in services under trial only, through their PYTHONPATH: production code
has no fault injection.

The folder of this file holds the orders. ``boot-N`` has the exit status with which worker N exits
at its start. ``poison`` makes workers die from requests with POISON_SEED. On SIGUSR2 a worker
carries out the order in the file named by its pid, and removes the file when done. An order to die
at some moment leaves ``PID.died``, with the time.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

ORDERS: Final = Path(__file__).resolve().parent
POISON_SEED: Final = 666_666
LEAVES_S: Final = 0.05
"""Time for the I/O thread to send a message before the process dies."""
SLOW_TURN_S: Final = 0.005
LEFT_NBYTES: Final = 2**26
"""Memory that this process may still allocate before it is refused."""
GARBLED: Final = b"\xc1 garbled"
"""No msgpack begins with this byte."""


def _hang() -> NoReturn:
    while True:
        pass


def _slow(factor: float) -> None:
    """Let this process work for a moment, and sleep for ``factor`` moments, in turns."""
    # Also during a pause, whose timer then does nothing.
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if factor <= 1.0:
        return

    def pause(_signal: int, _frame: FrameType | None) -> None:
        time.sleep(SLOW_TURN_S * (factor - 1.0))
        if signal.getsignal(signal.SIGALRM) is pause:
            signal.setitimer(signal.ITIMER_REAL, SLOW_TURN_S)

    signal.signal(signal.SIGALRM, pause)
    signal.setitimer(signal.ITIMER_REAL, SLOW_TURN_S)


def _lack_memory() -> None:
    """Be short of memory: no request fits beside a running one."""
    from mlx_dp.worker.scheduling.memory_room import MemoryRoom

    def lacks(self: MemoryRoom, nbytes: int) -> bool:
        return False

    MemoryRoom.try_evict_for = lacks  # type: ignore[method-assign]


def _fill_memory() -> None:
    """Allocate memory until the system refuses; the decode loop then raises the error."""
    import psutil

    most = int(psutil.Process().memory_info().vms) + LEFT_NBYTES
    # macOS refuses this limit, or accepts it and does not enforce it.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    held = [bytearray(LEFT_NBYTES // 4) for _ in range(16)]
    raise MemoryError(f"the system allocated {sum(map(len, held))} bytes, and sets no limit")


def _die(number: signal.Signals = signal.SIGKILL) -> None:
    """Exit, once all sent messages have left."""
    time.sleep(LEAVES_S)
    (ORDERS / f"{os.getpid()}.died").write_text(f"{time.monotonic()}")
    os.kill(os.getpid(), number)


def _die_at(tag: str, *, before: bool) -> None:
    """Get killed when a message with this tag is sent: before it leaves, or after."""

    def dying(send: Callable[[Any, Any], None], channel: Any, message: Any) -> None:
        if message.tag != tag:
            send(channel, message)
            return
        if not before:
            send(channel, message)
        _die()

    _wrap_send(dying)


def _die_in_prefill() -> None:
    """Get killed when a step with prompt tokens was launched, before any event about it."""
    from mlx_dp.worker.contract.engine import StepPlan
    from mlx_dp.worker.scheduling.scheduler import Scheduler

    plan, launched = Scheduler.plan, Scheduler.launched
    prefills = False

    def planned(self: Scheduler, budget: int) -> StepPlan:
        nonlocal prefills
        found = plan(self, budget)
        prefills = bool(found.prefill)
        return found

    def dying(self: Scheduler) -> None:
        launched(self)
        if prefills:
            _die()

    Scheduler.plan = planned  # type: ignore[method-assign]
    Scheduler.launched = dying  # type: ignore[method-assign]


def _garble() -> None:
    """Send one malformed frame ahead of the next message, and continue."""
    left = [GARBLED]

    def garbling(send: Callable[[Any, Any], None], channel: Any, message: Any) -> None:
        if left:
            channel._backlog.append(left.pop())
        send(channel, message)

    _wrap_send(garbling)


def _wrap_send(wrapper: Callable[[Callable[[Any, Any], None], Any, Any], None]) -> None:
    from mlx_dp.proto.wire.worker_channel import WorkerChannel

    send = WorkerChannel.send

    def wrapped(self: WorkerChannel, message: Any) -> None:
        wrapper(send, self, message)

    WorkerChannel.send = wrapped  # type: ignore[method-assign]


def _die_of_poison() -> None:
    from mlx_dp.proto.messages.commands import Down, Submit
    from mlx_dp.proto.messages.events import Accepted
    from mlx_dp.proto.wire.worker_channel import WorkerChannel

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
            _die(signal.SIGSEGV)

    WorkerChannel.drain = drained  # type: ignore[method-assign]
    _wrap_send(swallowed)


def _handle(_signal: int, _frame: FrameType | None) -> None:
    file = ORDERS / str(os.getpid())
    order, *arguments = file.read_text().split()
    match order:
        case "hang":
            _hang()
        case "slow":
            _slow(float(arguments[0]))
        case "exit":
            os._exit(int(arguments[0]))
        case "lack-memory":
            _lack_memory()
        case "fill-memory":
            _fill_memory()
        case "garble":
            _garble()
        case "ignore-abort":
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
        case "die-in-prefill":
            _die_in_prefill()
        case "die-before" | "die-after":
            _die_at(arguments[0], before=order == "die-before")
        case _:
            raise ValueError(f"unknown order {order!r}")
    file.unlink()


def _arm() -> None:
    identity = sys.orig_argv[sys.orig_argv.index("--identity") + 1]
    boot = ORDERS / f"boot-{identity.partition('-')[0].removeprefix('w')}"
    if boot.exists():
        os._exit(int(boot.read_text()))
    if (ORDERS / "poison").exists():
        _die_of_poison()
    signal.signal(signal.SIGUSR2, _handle)


if "mlx_dp.worker" in sys.orig_argv and "--identity" in sys.orig_argv:
    _arm()
