"""All open connections: at most so many, and idle ones make room for new ones."""

from typing import Protocol


class Connection(Protocol):
    """One connection of a client."""

    def check_deadlines(self, now: float) -> None:
        """Close it if its client is overdue."""

    def close_idle(self) -> None:
        """Close it between requests, because a new connection needs its place."""


class ConnectionTable:
    """At most ``max_connections`` connections. Invariant: those that wait are in the table."""

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._open: set[Connection] = set()
        # In the order in which they began to wait.
        self._waiting: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def try_add(self, connection: Connection) -> bool:
        """Add a connection, in place of the longest idle one if the table is full.

        False: the table is full, and all connections are being served.
        """
        if len(self._open) >= self._max:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.remove(longest)
            longest.close_idle()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def set_waiting(self, connection: Connection, waiting: bool) -> None:
        """Note whether a connection is between two requests, or before its first one."""
        if connection not in self._open:
            return
        if not waiting:
            self._waiting.pop(connection, None)
        elif connection not in self._waiting:
            self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection. Idempotent."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def check_deadlines(self, now: float) -> None:
        for connection in tuple(self._open):
            connection.check_deadlines(now)

    def check(self) -> None:
        assert self._waiting.keys() <= self._open, (len(self._waiting), len(self._open))
        assert len(self._open) <= self._max, (len(self._open), self._max)
