"""The controller's end of a simulated wire, with the real codec and the rules of its socket."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator

from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Down
from mlx_dp.proto.messages.events import Up
from mlx_dp.proto.wire.codec import decode_up, encode
from mlx_dp.proto.wire.controller_channel import NotConnectedError, PeerCongestedError
from tests.support.simulation.agenda import Agenda
from tests.support.simulation.armed import Armed
from tests.support.simulation.grants import GrantWatch
from tests.support.simulation.lane import Lane

FULL_FRAMES = 40
"""A worker with this many unread frames must wait for the controller."""


class Arrivals(list[tuple[str, Up | ProtocolError]]):
    """Reports each message to the watch at the moment of its receive."""

    watch: GrantWatch

    def __iter__(self) -> Iterator[tuple[str, Up | ProtocolError]]:
        for identity, event in super().__iter__():
            self.watch.received(identity, event)
            yield identity, event


class Link:
    """The connection of one incarnation."""

    def __init__(self, up: Lane, down: Lane) -> None:
        self.up = up
        self.down = down
        self.congested = False
        self._cuts = 0

    @property
    def cut(self) -> bool:
        return self._cuts > 0

    def break_off(self) -> None:
        """Lose all frames in flight; the worker keeps later ones."""
        self._cuts += 1
        self.up.lose()
        self.down.lose()
        self.up.holds = True

    def clear(self) -> None:
        self.congested = False

    def hurry(self) -> None:
        self.up.extra_s = self.down.extra_s = 0.0

    def join(self) -> None:
        self._cuts -= 1
        if not self._cuts:
            self.up.release()


class Wire:
    """``Transport`` over links. A send to a process that is gone may still seem to succeed."""

    endpoint = "simulated://"

    def __init__(
        self,
        agenda: Agenda,
        rng: random.Random,
        latency_s: float,
        watch: GrantWatch,
        on_arrival: Callable[[], None],
    ) -> None:
        self._agenda = agenda
        self._rng = rng
        self._latency_s = latency_s
        self._watch = watch
        self._on_arrival = on_arrival
        self._links: dict[str, Link] = {}
        self._known: set[str] = set()
        self._arrived: deque[tuple[str, bytes]] = deque()
        self.unknown_frames = 0

    def connect(self, identity: str, armed: Armed, arrive: Callable[[bytes], None]) -> Link:
        def arrived(frame: bytes) -> None:
            self._arrived.append((identity, frame))
            self._on_arrival()

        up = Lane(self._agenda, self._rng, self._latency_s, armed, arrived)
        down = Lane(self._agenda, self._rng, self._latency_s, armed, arrive)
        link = self._links[identity] = Link(up, down)
        return link

    def disconnect(self, identity: str) -> None:
        """A process is gone. Frames that its system had taken still arrive."""
        link = self._links[identity]
        link.down.closed = True
        link.up.lose(most=self._rng.randint(0, 3))

    def full(self, identity: str) -> bool:
        """The controller leaves too many frames of this worker unread."""
        waiting = sum(sender == identity for sender, _ in self._arrived)
        return waiting + len(self._links[identity].up) > FULL_FRAMES

    def expect(self, identity: str) -> None:
        self._known.add(identity)

    def forget(self, identity: str) -> None:
        self._known.discard(identity)

    def send(self, identity: str, message: Down) -> None:
        frame = encode(message)
        link = self._links.get(identity)
        gone = link is not None and link.down.closed
        if link is None or link.cut or (gone and self._rng.random() < 0.5):
            raise NotConnectedError(f"{identity}: not connected")
        if link.congested:
            raise PeerCongestedError(f"{identity}: full")
        self._watch.sent(identity, message)
        link.down.put(message.tag, frame)

    def drain(self) -> list[tuple[str, Up | ProtocolError]]:
        arrived = Arrivals()
        arrived.watch = self._watch
        while self._arrived:
            identity, frame = self._arrived.popleft()
            if identity not in self._known:
                self.unknown_frames += 1
                continue
            try:
                arrived.append((identity, decode_up(frame)))
            except ProtocolError as error:
                arrived.append((identity, error))
        return arrived

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        raise AssertionError("there is no event loop here")

    def close(self) -> None:
        self._arrived.clear()
