"""All connections of the endpoint: how many there may be, and who has to go."""

from typing import Protocol


class Client(Protocol):
    """One connection."""

    def check(self, now: float) -> None:
        """End it if something of it is overdue."""

    def give_way(self) -> None:
        """End it: it waits between requests, and somebody else needs its place."""


class Clients:
    """At most ``most`` connections. Invariant: those that wait are among those that are here."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._here: set[Client] = set()
        # In the order in which they began to wait.
        self._waiting: dict[Client, None] = {}

    def __len__(self) -> int:
        return len(self._here)

    def admit(self, client: Client) -> bool:
        """Make room for a connection. False: everybody here is being served."""
        if len(self._here) >= self._most:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.leave(longest)
            longest.give_way()
        self._here.add(client)
        self._waiting[client] = None
        return True

    def waits(self, client: Client, waiting: bool) -> None:
        """Note whether a connection is between two requests, or before its first one."""
        if client not in self._here:
            return
        if not waiting:
            self._waiting.pop(client, None)
        elif client not in self._waiting:
            self._waiting[client] = None

    def leave(self, client: Client) -> None:
        self._here.discard(client)
        self._waiting.pop(client, None)

    def sweep(self, now: float) -> None:
        for client in tuple(self._here):
            client.check(now)

    def check(self) -> None:
        assert self._waiting.keys() <= self._here, (len(self._waiting), len(self._here))
        assert len(self._here) <= self._most, (len(self._here), self._most)
