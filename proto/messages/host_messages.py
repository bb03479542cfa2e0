"""Messages between a controller and the hosts of its remote workers.

A host is ``mlx-dp worker`` on another machine: the process that starts, watches and kills one
worker there, on the controller's command. The worker itself speaks to the controller as every
other one does. Both sides send a message at least every ``heartbeat_s``. A side that has heard
nothing for ``silence_s`` treats the other as lost: the host ends its worker, and the controller
counts the worker as ended.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from mlx_dp.proto.capacity.parallel import Rank
from mlx_dp.proto.fields import Text

_PREFIX: Final = "host-"
_Beat = Annotated[float, Meta(gt=0.0, le=3600.0)]
Identity = Annotated[str, Meta(min_length=1, max_length=64)]


def host_identity(rank: int, incarnation: int) -> str:
    """Return the identity of one connection of a host. Never use one twice."""
    return f"{_PREFIX}{rank}-{incarnation:016x}"


def is_host(identity: bytes) -> bool:
    return identity.startswith(_PREFIX.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Host to controller: worker ``rank`` can run here. Repeated until the controller answers."""

    tag: ClassVar[str] = "join"

    rank: Rank
    host: Text
    pid: Annotated[int, Meta(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Host to controller: the host is alive."""

    tag: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """Host to controller: the worker of this identity has ended, and so have its children."""

    tag: ClassVar[str] = "worker_exited"

    identity: Identity
    status: Annotated[int, Meta(ge=-128, lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Host to controller: nothing runs here any longer, and the host ends."""

    tag: ClassVar[str] = "leave"

    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Controller to host: the host is admitted, and must keep these times."""

    tag: ClassVar[str] = "welcome"

    heartbeat_s: _Beat
    silence_s: _Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Deny:
    """Controller to host: the host is not admitted. ``final``: retrying does not help."""

    tag: ClassVar[str] = "deny"

    reason: Text
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Controller to host: start a worker under this identity."""

    tag: ClassVar[str] = "launch"

    identity: Identity
    model_path: Text
    """The model's path on the controller; empty for the fake engine."""
    model_fingerprint: Text
    """What the host's own model must have too."""
    log_level: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorker:
    """Controller to host: send this signal to the worker, or SIGKILL to its whole group."""

    tag: ClassVar[str] = "signal_worker"

    identity: Identity
    signal: Annotated[int, Meta(ge=1, lt=128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Controller to host: the controller is alive."""

    tag: ClassVar[str] = "ping"


HostUp = Join | Alive | WorkerExited | Leave
HostDown = Welcome | Deny | Launch | SignalWorker | Ping
