"""A worker's end of the wire: the real loop sends through it, and may die in a send."""

from collections import deque
from collections.abc import Callable

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down, Submit
from mlx_dp.proto.messages.events import Accepted, Finished, Preempted, Prefilled, Tokens, Up
from mlx_dp.proto.wire.codec import decode_down, encode
from tests.support.simulation.armed import Armed
from tests.support.simulation.schedule import POISON, FaultKind
from tests.support.simulation.wire import Link


class ProcessDiedError(Exception):
    """The process ends in the middle of its work."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class WorkerEnd:
    """``Channel`` of a worker's loop. Asserts that the loop's messages are consistent."""

    def __init__(self, link: Link, armed: Armed, full: Callable[[], bool]) -> None:
        self._link = link
        self._armed = armed
        self._full = full
        self._inbox: deque[bytes] = deque()
        self._running: dict[int, tuple[int, int, bool]] = {}
        """Epoch and slot by request, and whether its prompt is prefilled."""
        self.waits_s: float | None = None
        """How long the loop wants to sleep, until it is woken."""
        self.malformed_frames = 0
        self._poisons: set[int] = set()
        self.reused: dict[int, int] = {}
        """Cached tokens by slot, as the engine was given them."""

    @property
    def poisoned(self) -> bool:
        """It runs the request that kills it."""
        return not self._poisons.isdisjoint(self._running)

    @property
    def congested(self) -> bool:
        return self._full()

    @property
    def unread(self) -> int:
        return len(self._inbox)

    def arrived(self, frame: bytes) -> None:
        self._inbox.append(frame)

    def drain(self) -> list[Down]:
        messages: list[Down] = []
        while self._inbox:
            try:
                message = decode_down(self._inbox.popleft())
            except ProtocolError:
                self.malformed_frames += 1
                continue
            messages.append(message)
            if isinstance(message, Submit) and message.prompt_ids[0] == POISON:
                self._poisons.add(message.request_id)
        return messages

    def wait(self, timeout_s: float) -> bool:
        self.waits_s = timeout_s
        return False

    def send(self, message: Up) -> None:
        deaths = self._armed.due(message.tag, FaultKind.DIE_SAYING)
        for death in deaths:
            if not death.after:
                raise ProcessDiedError(death.status)
        self._verify(message)
        self._link.up.put(message.tag, encode(message))
        for death in deaths:
            raise ProcessDiedError(death.status)

    def _verify(self, message: Up) -> None:
        running = self._running
        match message:
            case Accepted(request_id=request_id, epoch=epoch, slot=slot):
                assert request_id not in running, f"accepted twice: {message}"
                taken = {slot for _, slot, _ in running.values()}
                assert slot not in taken, f"I2: slot {slot} has two owners: {running}"
                running[request_id] = (epoch, slot, False)
            case Prefilled(request_id=request_id, epoch=epoch, cached_tokens=cached_tokens):
                held, slot, prefilled = running[request_id]
                assert held == epoch and not prefilled, f"{message}: {running}"
                assert cached_tokens == self.reused[slot], f"I8: {message}: {self.reused}"
                running[request_id] = (epoch, slot, True)
            case Tokens():
                for chunk in message.chunks:
                    epoch, _, prefilled = running[chunk.request_id]
                    assert epoch == chunk.epoch and prefilled, f"{chunk}: {running}"
            case Finished(request_id=request_id) | Preempted(request_id=request_id):
                assert request_id in running, f"I3: ends twice: {message}"
                epoch, _, _ = running.pop(request_id)
                assert epoch == message.epoch, f"{message} of epoch {epoch}"
            case _:
                pass
