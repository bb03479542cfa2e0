"""The service as configured, after the flags were parsed and validated."""

from dataclasses import dataclass, field
from pathlib import Path

from mlx_dp.proto.group import DistributedBackend
from mlx_dp.proto.messages import EngineKind, FakeEngineOptions
from mlx_dp.proto.ownership import Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The endpoint. ``api_key`` None: open to whoever reaches the address."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str
    """The name in answers, and the first of those that clients ask for."""
    served_aliases: tuple[str, ...] = ()
    """Further names, listed beside it."""
    own_model_names: tuple[str, ...] = ()
    """What the model is called by itself, its path and hub id: taken, and not listed."""
    context_length: int | None = None
    """What was asked for, which holds until an owner says what it has."""
    drain_timeout_s: float = 30.0
    max_body_nbytes: int = 16 * 2**20
    """A larger request body is refused with 413. JSON of a full 1M-token prompt fits."""
    max_bodies_nbytes: int = 128 * 2**20
    """The most that all bodies together may take before their requests are queued."""
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive is refused with 408."""
    head_timeout_s: float = 10.0
    """The same for what comes before the body; a connection begins with one."""
    idle_timeout_s: float = 120.0
    """Routers keep connections open between requests; one that we close is a failed request."""
    send_timeout_s: float = 30.0
    """A client that takes nothing of its answer for so long is dropped."""
    max_connections: int = 16_384
    """One more takes the place of one that is idle, or is refused with 503."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may call this endpoint by, beside its own; "*" stands for any."""
    hostname: str = ""
    """This machine's own name, by which it may be called too."""
    cors_origins: tuple[str, ...] = ()
    """Pages that browsers may let ask, as ``normal_origin`` has them."""
    open_metadata: bool = False
    """Whether routes that tell of the model, the server and its load need no key."""
    keep_alive_s: float = 10.0
    """Silence on a stream after which a comment line is sent."""
    probe_timeout_s: float = 20.0
    """What /health_generate waits for its tokens."""
    flush_timeout_s: float = 20.0
    """What /flush_cache waits for its owners, which may be in a long step."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return (self.served_model_name, *self.served_aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The one queue of the service, and the deadlines of a request in it and out of it."""

    max_queued_requests: int = 1024
    queue_timeout_s: float = 300.0
    request_timeout_s: float = 3600.0
    load_balance_method: str = "total_tokens"
    strict_max_tokens: bool = False
    """Whether an answer longer than what its prompt leaves is refused, in place of being cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What every worker is started with; the owner's slice is added per worker."""

    engine: EngineKind = EngineKind.MLX
    model_path: Path | None = None
    trust_remote_code: bool = False
    """Whether the model may bring code that is run."""
    memory_nbytes: int | None = None
    """One worker's share of the device, for ``Start``; None leaves MLX's own limits."""
    context_length: int | None = None
    chunked_prefill_size: int = 512
    prefix_cache: bool = True
    heartbeat_interval_s: float = 0.5
    hang_timeout_s: float = 10.0
    start_timeout_s: float = 600.0
    max_restarts: int = 5
    """Restarts of one worker within ``restart_window_s``, after which it counts as failed."""
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.25
    """Before the first restart of a worker; further ones wait longer."""
    log_level: str = "info"
    distributed_backend: DistributedBackend = DistributedBackend.RING
    """What a dp-attention group computes over."""
    shard_vocabulary: bool = False
    """Whether such a group divides embedding and head as well."""
    fake: FakeEngineOptions = field(default_factory=FakeEngineOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    http: HttpOptions
    queue: QueueOptions
    worker: WorkerOptions
    ownership: Ownership
    weights_nbytes: tuple[int, ...] = ()
    """What the plan says that each worker will hold of the weights, where it says so."""
