"""The controller's side of the wire for one rank, whose worker lives until all ranks are done."""

import select
from collections.abc import Callable, Sequence

from mlx_dp.proto.messages.commands import Down, Shutdown, Start
from tests.support.conformance.client import Client
from tests.support.conformance.scenario import Ask

GLANCE_S = 0.02
"""How long an idle worker waits for its peers before its client checks whether all are done."""


class RankClient(Client):
    """Reports the end of its own requests, and stays idle until the other ranks' requests end."""

    def __init__(
        self, start: Start, asks: Sequence[Ask], *, at_once: int, all_done: Callable[[], bool]
    ) -> None:
        super().__init__(start, asks, at_once=at_once)
        self._all_done = all_done
        self.idle_turns = 0

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        if beside is not None:
            select.select([beside], [], [], GLANCE_S)
        return super().wait(timeout_s)

    def drain(self) -> list[Down]:
        commands = super().drain()
        if any(isinstance(command, Shutdown) for command in commands) and not self._all_done():
            self.idle_turns += 1
            self._turn = 0
            return []
        return commands
