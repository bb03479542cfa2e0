"""What the controller needs of worker processes; the launcher has them, tests have fakes."""

from collections.abc import Callable
from typing import Protocol


class WorkerProcess(Protocol):
    """One child. Every method is a no-op once the child has exited, and none of them waits.

    There is no SIGTERM: workers ignore it, since systemd and others send it to all of a service.
    """

    @property
    def pid(self) -> int: ...

    @property
    def halted(self) -> bool:
        """It was stopped by a signal, and not continued since, as far as the system tells."""

    def abort(self) -> None:
        """The child writes its stacks to the log. It may live on: ``kill`` follows."""

    def kill(self) -> None:
        """SIGKILL to the child's whole process group."""


class Launcher(Protocol):
    """Starts worker processes that connect to an endpoint under a given identity."""

    def spawn(
        self, index: int, identity: str, endpoint: str, on_exit: Callable[[int], None]
    ) -> WorkerProcess:
        """Start worker ``index``.

        ``on_exit`` runs once, in the event loop and never inside this call, as soon as the child
        has exited; its argument is the exit status, or the negated signal number. Raises OSError
        when no process could be made.
        """
