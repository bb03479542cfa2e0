"""Turns flags into validated options. An error names the flag, its value and what would work."""

from typing import Final

from mlx_dp.orchestrator.config.flags import FakeFlags, Flags, HttpFlags, ModelFlags, OwnerFlags
from mlx_dp.orchestrator.config.unused_flags import refuse_unused_flags
from mlx_dp.orchestrator.control.routing.policies import policy_row
from mlx_dp.orchestrator.control.workers.liveness import MISSING_HEARTBEATS
from mlx_dp.orchestrator.http.access.host_policy import HOST_NAME, normal_origin
from mlx_dp.orchestrator.options import HttpOptions, QueueOptions
from mlx_dp.orchestrator.text.chat.chat_template import read_template
from mlx_dp.proto.capacity.ownership import Limits, Ownership, divide, divide_prefill
from mlx_dp.proto.capacity.parallel import Topology, resolve_topology
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.commands import FakeEngineOptions

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_MAX_COUNT: Final = 2**31 - 1
_MAX_SECONDS: Final = 1e9
# Descriptors of our own: pipes and sockets of the workers, and the model's files.
_OWN_FILES: Final = 192

# For compiling, warm-up and checks, beside reading the weights at the pace of a network share.
_START_S: Final = 600.0
_SLOWEST_DISK_NBYTES_PER_S: Final = 20e6

_MAX_NAME_CHARS: Final = 1024


def check_flags(flags: Flags) -> None:
    """Refuse invalid values, unless another module refuses them in terms of the flag."""
    _check_method(flags)
    _one_of("--log-level", flags.http.log_level, LOG_LEVELS)
    if not 0.0 < flags.owners.mem_fraction_static <= 1.0:
        raise ConfigError(
            f"--mem-fraction-static {flags.owners.mem_fraction_static:g} is out of range: use "
            "more than 0 and at most 1"
        )
    if flags.model.context_length is not None:
        _within("--context-length", flags.model.context_length, 2)
    for flag, value, most in (
        ("--max-running-requests", flags.owners.max_running_requests, 2**20),
        ("--max-mamba-cache-size", flags.owners.max_mamba_cache_size, 2**53 - 1),
        ("--max-total-tokens", flags.owners.max_total_tokens, 2**53 - 1),
    ):
        if value is not None:
            _within(flag, value, 1, most)
    _within("--chunked-prefill-size", flags.owners.chunked_prefill_size, 1)
    _within("--max-restarts", flags.owners.max_restarts, 0)
    for flag, value_s in (
        ("--heartbeat-interval", flags.owners.heartbeat_interval),
        ("--hang-timeout", flags.owners.hang_timeout),
        ("--restart-delay", flags.owners.restart_delay),
    ):
        _seconds(flag, value_s, most=3600.0)
    _check_hang_timeout(flags.owners)
    _seconds("--restart-window", flags.owners.restart_window)
    if flags.owners.start_timeout is not None:
        _seconds("--start-timeout", flags.owners.start_timeout)
    _within("--max-queued-requests", flags.queue.max_queued_requests, 1)
    _within("--port", flags.http.port, 0, 65535)
    _seconds("--queue-timeout", flags.queue.queue_timeout)
    _seconds("--request-timeout", flags.queue.request_timeout)
    _seconds("--drain-timeout", flags.http.drain_timeout, least=0.0)
    _within("--max-connections", flags.http.max_connections, 1, 2**20)
    _check_group(flags.owners)
    _check_key(flags.http)
    _check_hosts(flags.http)
    _check_origins(flags.http)
    _check_names(flags.model)
    _check_fake(flags.fake)
    _check_revision(flags.model)
    # Last, since a value that is out of range is the more useful error.
    refuse_unused_flags(flags)
    if flags.model.chat_template is not None:
        read_template(flags.model.chat_template)


def topology(flags: OwnerFlags) -> Topology:
    return resolve_topology(
        dp_size=flags.dp_size,
        tp_size=flags.tp_size,
        enable_dp_attention=flags.enable_dp_attention,
    )


def limits(flags: OwnerFlags) -> Limits:
    return Limits(
        max_running_requests=flags.max_running_requests,
        max_mamba_cache_size=flags.max_mamba_cache_size,
        max_total_tokens=flags.max_total_tokens,
    )


def ownership(flags: OwnerFlags) -> Ownership:
    """Divide the limits among the owners, as far as possible before the model is known."""
    return divide(topology(flags), limits(flags))


def chunked_prefill_size(flags: OwnerFlags) -> int:
    """One worker's share: the owners of a group divide the flag, since they step together."""
    return divide_prefill(flags.chunked_prefill_size, ranks=topology(flags).attn_dp_size)


def start_timeout_s(flags: OwnerFlags, weights_nbytes: int) -> float:
    """The time that a worker may take to load."""
    if flags.start_timeout is not None:
        return flags.start_timeout
    return _START_S + weights_nbytes / _SLOWEST_DISK_NBYTES_PER_S


def queue_options(flags: Flags) -> QueueOptions:
    return QueueOptions(
        max_queued_requests=flags.queue.max_queued_requests,
        queue_timeout_s=flags.queue.queue_timeout,
        request_timeout_s=flags.queue.request_timeout,
        load_balance_method=flags.queue.load_balance_method,
        strict_max_tokens=flags.http.strict_max_tokens,
    )


def http_options(
    flags: HttpFlags,
    *,
    served_model_name: str,
    port: int,
    open_files: int,
    served_aliases: tuple[str, ...] = (),
    own_model_names: tuple[str, ...] = (),
    context_length: int | None = None,
    hostname: str = "",
) -> HttpOptions:
    """Options of the HTTP side. ``port`` is the bound port, which differs from a flag of 0."""
    return HttpOptions(
        host=flags.host,
        port=port,
        api_key=flags.api_key,
        served_model_name=served_model_name,
        served_aliases=served_aliases,
        own_model_names=own_model_names,
        context_length=context_length,
        hostname=hostname,
        cors_origins=tuple(dict.fromkeys(map(normal_origin, flags.cors_origin or ()))),
        drain_timeout_s=flags.drain_timeout,
        max_connections=min(flags.max_connections, max(1, open_files - _OWN_FILES)),
        allowed_hosts=tuple(flags.allowed_host or ()),
        open_metadata=flags.open_metadata,
    )


def fake_options(flags: FakeFlags) -> FakeEngineOptions:
    return FakeEngineOptions(
        decode_tokens_per_s=flags.fake_decode_rate,
        prefill_tokens_per_s=flags.fake_prefill_rate,
        pool_tokens=flags.fake_pool_tokens,
        vocab_size=flags.fake_vocab_size,
        context_length=flags.fake_context_length,
        hybrid=flags.fake_hybrid,
        seed=flags.fake_seed,
        load_s=flags.fake_load_time,
    )


def _check_method(flags: Flags) -> None:
    method = flags.queue.load_balance_method
    if policy_row(method).needs_prefix_cache and flags.owners.disable_radix_cache:
        raise ConfigError(
            f"--load-balance-method {method} routes by the contents of prefix caches, and "
            "--disable-radix-cache disables them: use one of the two"
        )


def _check_group(flags: OwnerFlags) -> None:
    if flags.enable_dp_attention and flags.chunked_prefill_size < flags.dp_size:
        raise ConfigError(
            f"--chunked-prefill-size {flags.chunked_prefill_size} leaves 0 tokens per owner "
            f"(dp_size={flags.dp_size}): use at least {flags.dp_size}, or omit the flag"
        )


def _check_hang_timeout(flags: OwnerFlags) -> None:
    least_s = MISSING_HEARTBEATS * flags.heartbeat_interval
    if flags.hang_timeout < least_s:
        raise ConfigError(
            f"--hang-timeout {flags.hang_timeout:g} is less than {MISSING_HEARTBEATS} heartbeats "
            f"of {flags.heartbeat_interval:g} s, so one late heartbeat would kill a worker: use "
            f"at least {least_s:g}"
        )


def _check_key(flags: HttpFlags) -> None:
    # An empty key from the environment would look like protection, but protect nothing.
    if flags.api_key is not None and not flags.api_key.strip():
        raise ConfigError("--api-key (or MLX_DP_API_KEY) is empty: give a key, or omit it")


def _check_revision(flags: ModelFlags) -> None:
    if flags.revision is not None and not flags.revision.strip():
        raise ConfigError("--revision is empty: give a name, or omit it for the newest")


def _check_hosts(flags: HttpFlags) -> None:
    for name in flags.allowed_host or ():
        if not HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"--allowed-host {name!r} is not a host name: use one such as llm.example.com, "
                "without scheme, port or path, or * for any"
            )


def _check_origins(flags: HttpFlags) -> None:
    for origin in flags.cors_origin or ():
        try:
            normal_origin(origin)
        except ValueError as error:
            raise ConfigError(f"--cors-origin {origin!r} is not an origin: {error}") from error


def _check_names(flags: ModelFlags) -> None:
    for name in flags.served_model_name or ():
        if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
            raise ConfigError(
                f"--served-model-name {name[:80]!r} is not a valid name: use 1 to "
                f"{_MAX_NAME_CHARS} printable characters, or omit the flag to serve the model by "
                "its own name"
            )


def _check_fake(flags: FakeFlags) -> None:
    _seconds("--fake-decode-rate", flags.fake_decode_rate, least=0.0)
    _seconds("--fake-prefill-rate", flags.fake_prefill_rate, least=0.0)
    _seconds("--fake-load-time", flags.fake_load_time, least=0.0)
    _within("--fake-pool-tokens", flags.fake_pool_tokens, 1, 2**53 - 1)
    _within("--fake-vocab-size", flags.fake_vocab_size, 2)
    _within("--fake-context-length", flags.fake_context_length, 2)
    _within("--fake-seed", flags.fake_seed, 0, 2**63 - 1)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is unknown: use one of {', '.join(allowed)}")


def _within(flag: str, value: int, least: int, most: int = _MAX_COUNT) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{flag} {value} is out of range: use {least} to {most}")


def _seconds(
    flag: str, value: float, *, least: float | None = None, most: float = _MAX_SECONDS
) -> None:
    # Written so that NaN, which compares false with everything, is refused as well.
    if least is None:
        if not 0.0 < value <= most:
            raise ConfigError(
                f"{flag} {value:g} is out of range: use more than 0 and at most {most:.0f}"
            )
    elif not least <= value <= most:
        raise ConfigError(f"{flag} {value:g} is out of range: use {least:g} to {most:.0f}")
