"""The ranks' agreement on each pass, over sockets of their own.

Collectives cannot carry it: they wait for the device, so steps would no longer overlap.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.curve_keys import CurveKeys
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.proto.wire.curve import KeyGuard, join_curve, serve_curve
from mlx_dp.proto.wire.sockets import new_context
from mlx_dp.worker.contract.peers import RankLostError
from mlx_dp.worker.lockstep.announcement import (
    Announcement,
    AnnouncementBoard,
    ForeignFrameError,
    RankRows,
    decode,
)

_SLICE_S: Final = 0.05
"""The wait for a peer before ``awaiting`` is called."""
_HIGH_WATER_MARK: Final = 16
"""More frames than a peer can be ahead by."""
_MAX_FRAME_BYTES: Final = 4_096
"""The frames of a CURVE handshake count as well, and are longer than an announcement."""

_logger = logging.getLogger(__name__)


class RankExchange:
    """Exchanges with all peers the number of rows of each rank in the next pass.

    Owned by one thread. ``dropped_frames`` counts frames of another group or another time.
    """

    def __init__(
        self,
        place: GroupPlace,
        fingerprint: bytes,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place: Final = place
        self._fingerprint: Final = fingerprint
        self._deadline_s: Final = deadline_s
        self._clock: Final = clock
        self._board: Final = AnnouncementBoard(
            generation=place.generation, rank=place.rank, size=place.size
        )
        self.dropped_frames = 0
        self._context: Final = new_context()
        self._guard: Final = self._guarded(place.curve)
        self._inbox: Final = self._socket(zmq.PULL)
        if place.curve is not None:
            serve_curve(self._inbox, place.curve)
        self._inbox.bind(place.peers[place.rank])
        self._outboxes: Final = [
            self._connected(endpoint)
            for rank, endpoint in enumerate(place.peers)
            if rank != place.rank
        ]

    @property
    def fd(self) -> int:
        """Becomes readable when something may have arrived since the last ``poll_wanted``."""
        return int(self._inbox.getsockopt(zmq.FD))

    def poll_wanted(self) -> bool:
        """Read all that has arrived; return whether a peer has entered the next pass."""
        self._receive()
        return self._board.wanted

    def agree(self, rows: RankRows, awaiting: Callable[[int], None]) -> tuple[RankRows, ...]:
        """Return the rows of each rank in the next pass; ``rows`` are this rank's.

        While it waits it calls ``awaiting`` with the late rank again and again, and passes on what
        that raises. Raises RankLostError after the deadline, ConfigError for a peer with another
        model.
        """
        self._announce(rows)
        self._receive()
        until = self._clock() + self._deadline_s
        while missing := self._board.missing:
            if not self._inbox.poll(round(_SLICE_S * 1000)):
                awaiting(missing[0])
                if self._clock() >= until:
                    raise RankLostError(
                        f"rank {missing[0]} did not come to pass {self._board.number} within "
                        f"{self._deadline_s:g} s",
                        missing[0],
                    )
            self._receive()
        return self._board.agree(self._place.rank, rows)

    def close(self) -> None:
        for socket in (self._inbox, *self._outboxes):
            socket.close(linger=0)
        self._context.term()
        if self._guard is not None:
            self._guard.close()

    def _announce(self, rows: RankRows) -> None:
        announcement = Announcement(
            generation=self._place.generation,
            rank=self._place.rank,
            number=self._board.number,
            rows=rows,
            fingerprint=self._fingerprint,
        )
        frame = announcement.encode()
        for outbox in self._outboxes:
            # Never full: this rank cannot get here before each peer has read its last frame.
            outbox.send(frame, zmq.NOBLOCK)

    def _receive(self) -> None:
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                announcement = decode(frame)
                self._board.add(announcement)
            except ForeignFrameError as error:
                self.dropped_frames += 1
                _logger.warning("dropped a frame that came as a peer's: %s", error)
                continue
            if announcement.fingerprint != self._fingerprint:
                raise ConfigError(
                    f"rank {announcement.rank} runs another model than rank {self._place.rank}, or "
                    "divides it otherwise: all ranks need the same files and the same versions"
                )

    def _guarded(self, curve: CurveKeys | None) -> KeyGuard | None:
        """Return the guard that admits only holders of the keys; None: there are no keys."""
        return None if curve is None else KeyGuard(self._context, frozenset({curve.public}))

    def _connected(self, endpoint: str) -> "zmq.Socket[bytes]":
        outbox = self._socket(zmq.PUSH)
        curve = self._place.curve
        if curve is not None:
            join_curve(outbox, curve, curve.public)
        outbox.connect(endpoint)
        return outbox

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        return socket
