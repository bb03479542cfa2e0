"""Options of the service, from parsed and validated flags."""

from dataclasses import dataclass, field
from pathlib import Path

from mlx_dp.proto.capacity.ownership import Ownership
from mlx_dp.proto.messages.commands import EngineKind, FakeEngineOptions
from mlx_dp.proto.messages.group import DistributedBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP side. ``api_key`` None: no authentication."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str
    """The model name in responses, and the first name that clients may request."""
    served_aliases: tuple[str, ...] = ()
    """Further names, also listed."""
    own_model_names: tuple[str, ...] = ()
    """The model's own path and hub id: accepted, but not listed."""
    context_length: int | None = None
    """The flag's value, used until an owner reports its own."""
    drain_timeout_s: float = 30.0
    max_body_nbytes: int = 16 * 2**20
    """Larger request bodies are refused with 413. JSON of a full 1M-token prompt fits."""
    max_bodies_nbytes: int = 128 * 2**20
    """The memory limit of all bodies together until their requests are queued."""
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive is refused with 408."""
    head_timeout_s: float = 10.0
    """The same for the request head, also the first one of a connection."""
    idle_timeout_s: float = 120.0
    """Long, since routers reuse idle connections, and a request on one that we close fails."""
    send_timeout_s: float = 30.0
    """A client that reads nothing of its response for so long is dropped."""
    max_connections: int = 16_384
    """Beyond it an idle connection is closed, or the new one is refused with 503."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use beside its own; "*" allows any."""
    hostname: str = ""
    """This machine's own name, which is allowed too."""
    cors_origins: tuple[str, ...] = ()
    """Allowed CORS origins, in the form of ``normal_origin``."""
    open_metadata: bool = False
    """Whether routes about the model, the server and its load need no key."""
    keep_alive_s: float = 10.0
    """The interval of SSE keep-alive comments on an idle stream."""
    probe_timeout_s: float = 20.0
    """How long /health_generate waits for its tokens."""
    flush_timeout_s: float = 20.0
    """How long /flush_cache waits for owners, which may be in a long step."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return (self.served_model_name, *self.served_aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of the queue, of routing, and of request deadlines."""

    max_queued_requests: int = 1024
    queue_timeout_s: float = 300.0
    request_timeout_s: float = 3600.0
    load_balance_method: str = "total_tokens"
    strict_max_tokens: bool = False
    """Whether a max_tokens beyond the context is refused instead of clamped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of every worker; each also gets its owner's slice."""

    engine: EngineKind = EngineKind.MLX
    model_path: Path | None = None
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    memory_nbytes: int | None = None
    """One worker's share of the device memory; None leaves MLX's own limits."""
    context_length: int | None = None
    chunked_prefill_size: int = 512
    """One worker's share of the flag."""
    prefix_cache: bool = True
    heartbeat_interval_s: float = 0.5
    hang_timeout_s: float = 10.0
    start_timeout_s: float = 600.0
    max_restarts: int = 5
    """Restarts of a worker within ``restart_window_s``; beyond them it counts as failed."""
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.25
    """The delay before the first restart of a worker; later ones are longer."""
    log_level: str = "info"
    distributed_backend: DistributedBackend = DistributedBackend.RING
    """The backend of a dp-attention group's collectives."""
    shard_vocabulary: bool = False
    """Whether such a group also divides the embedding and the LM head."""
    fake: FakeEngineOptions = field(default_factory=FakeEngineOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    http: HttpOptions
    queue: QueueOptions
    worker: WorkerOptions
    ownership: Ownership
    weights_nbytes: tuple[int, ...] = ()
    """The planned bytes of weights by worker; empty when unknown."""
