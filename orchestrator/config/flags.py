"""The flags of ``mlx-dp serve`` and ``mlx-dp plan``, declared once.

Only types are validated here; configuration.py does the rest.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from mlx_dp.orchestrator.control.routing.policies import methods_in_words
from mlx_dp.proto.messages.commands import EngineKind
from mlx_dp.proto.messages.group import DistributedBackend

API_KEY_VARIABLE: Final = "MLX_DP_API_KEY"

_PER_OWNER: Final = (
    "Unit: [bold]per replica[/bold], or [bold]for the whole group[/bold] with "
    "--enable-dp-attention, where each owner gets 1/dp_size."
)

_model = partial(typer.Option, rich_help_panel="Model")
_owners = partial(typer.Option, rich_help_panel="Workers and capacity")
_queue = partial(typer.Option, rich_help_panel="Queue and routing")
_http = partial(typer.Option, rich_help_panel="Endpoint")
_fake = partial(typer.Option, rich_help_panel="The fake engine (--engine fake)")
_remote = partial(typer.Option, rich_help_panel="Workers on other machines")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    model: Annotated[
        str | None,
        _model(
            "--model",
            "--model-path",
            help="An mlx-lm model directory, a hub id like org/name, or a llama-family .gguf file. "
            "Without it a small demo model is fetched once and served.",
        ),
    ] = None
    revision: Annotated[str | None, _model(help="Branch, tag or commit of a hub model.")] = None
    context_length: Annotated[
        int | None,
        _model(
            help="Maximum tokens of a request, prompt and output together, in every replica mode. "
            "Default: the model's own limit."
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _model(
            "--served-model-name",
            help="The model name for clients. Takes several names, and is repeatable; responses "
            "carry the first. The model's path and hub id are accepted too. Default: the model's "
            "own name.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        _model(
            metavar="FILE",
            help="A jinja file that replaces the model's chat template, for a model with none or a "
            "broken one.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        _model(
            "--trust-remote-code",
            help="Run Python code that comes with the model, for architectures and tokenizers that "
            "bring their own. It can do anything that you can do on this machine: read it first.",
        ),
    ] = False
    engine: Annotated[
        EngineKind,
        _model(
            help="fake: a deterministic engine without a model and without MLX, for tests of "
            "clients and load balancers."
        ),
    ] = EngineKind.MLX


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerFlags:
    dp_size: Annotated[
        int,
        _owners(
            "--dp-size",
            "--dp",
            help="Number of owners. Each serves requests in its own process, with its own request "
            "slots, KV tokens and auxiliary states.",
        ),
    ] = 1
    tp_size: Annotated[
        int | None,
        _owners(
            "--tp-size",
            "--tp",
            help="Processes of a dp-attention group. Default: --dp-size with "
            "--enable-dp-attention, else 1.",
        ),
    ] = None
    enable_dp_attention: Annotated[
        bool,
        _owners(
            "--enable-dp-attention",
            help="Run one group of processes in lockstep instead of independent replicas. Each "
            "owner computes attention for its own requests, and holds 1/tp_size of the MLP and "
            "expert weights. For models whose weights do not fit --dp-size times; otherwise prefer "
            "replicas, which never wait for each other. Limits apply to the whole group.",
        ),
    ] = False
    distributed_backend: Annotated[
        DistributedBackend | None,
        _owners(
            "--distributed-backend",
            help="Backend for the collectives of a dp-attention group: ring (TCP, the default), "
            "jaccl (Thunderbolt with RDMA) or nccl (CUDA). MLX must be built with it. Only with "
            "--enable-dp-attention.",
        ),
    ] = None
    enable_dp_lm_head: Annotated[
        bool,
        _owners(
            "--enable-dp-lm-head",
            help="Also divide the embedding and the LM head over the vocabulary: saves memory when "
            "the vocabulary is large, but adds one exchange per step. Only with "
            "--enable-dp-attention.",
        ),
    ] = False
    max_running_requests: Annotated[
        int | None,
        _owners(
            help=f"Maximum number of concurrently running requests. {_PER_OWNER} Default: half "
            "the KV tokens, at most 4096 per owner."
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        _owners(
            help="KV tokens. Unit: [bold]per worker[/bold] in both modes, never divided. Default, "
            "and upper bound: what fits in its memory."
        ),
    ] = None
    max_mamba_cache_size: Annotated[
        int | None,
        _owners(
            help=f"Auxiliary-state slots of a hybrid model. {_PER_OWNER} A running request needs 4 "
            "of them, or 1 with --disable-radix-cache. Default: enough for all request slots."
        ),
    ] = None
    mem_fraction_static: Annotated[
        float,
        _owners(
            help="Fraction of the device memory that [bold]all workers together[/bold] may use for "
            "weights, KV and states, divided evenly. On a CPU, of half of the RAM."
        ),
    ] = 0.8
    chunked_prefill_size: Annotated[
        int,
        _owners(
            help="Prompt tokens computed between two decode steps. Unit: [bold]per worker[/bold], "
            "or [bold]for the whole group[/bold] with --enable-dp-attention, where each owner gets "
            "1/dp_size, since all take part in each step. Smaller values keep running streams "
            "smooth; larger ones finish long prompts sooner."
        ),
    ] = 512
    disable_radix_cache: Annotated[
        bool,
        _owners("--disable-radix-cache", help="Do not cache prompt prefixes."),
    ] = False
    max_restarts: Annotated[
        int,
        _owners(
            help="Maximum restarts within --restart-window; beyond them a worker counts as failed. "
            "Unit: [bold]per worker[/bold]."
        ),
    ] = 5
    restart_window: Annotated[float, _owners(help="The window of --max-restarts, in seconds.")] = (
        60.0
    )
    start_timeout: Annotated[
        float | None,
        _owners(
            help="Seconds that a worker may take to load its model before it is restarted. "
            "Default: 600, plus the time to read the weights at 20 MB/s."
        ),
    ] = None
    hang_timeout: Annotated[
        float,
        _owners(
            help="Seconds without progress after which a worker is killed and replaced. While it "
            "computes a prompt it gets more, by its measured pace. From 2 to 3600."
        ),
    ] = 10.0
    # Hidden: the defaults suit every model; tests of faults need shorter times.
    heartbeat_interval: Annotated[
        float, _owners(hidden=True, help="Seconds between a worker's heartbeats.")
    ] = 0.5
    restart_delay: Annotated[
        float,
        _owners(
            hidden=True,
            help="Seconds before the first restart; doubles for each further one, up to 120-fold.",
        ),
    ] = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFlags:
    load_balance_method: Annotated[
        str,
        _queue(help=f"How to choose among owners that have room: {methods_in_words()}."),
    ] = "total_tokens"
    max_queued_requests: Annotated[
        int,
        _queue(
            help="Maximum requests that wait for a slot; further ones get 429. Unit: [bold]the "
            "whole service[/bold] in both modes, since there is one queue."
        ),
    ] = 1024
    queue_timeout: Annotated[
        float, _queue(help="Seconds that a request may wait in the queue.")
    ] = 300.0
    request_timeout: Annotated[float, _queue(help="Seconds that a request may take in total.")] = (
        3600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFlags:
    host: Annotated[str, _http(help="Address to listen on; 0.0.0.0 for every network.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _http(help="Port to listen on; 0 picks a free one and prints it.")] = 8000
    api_key: Annotated[
        str | None,
        _http(
            envvar=API_KEY_VARIABLE,
            help="The bearer token that clients must send. Prefer the environment variable, which "
            "other users of the machine cannot read.",
        ),
    ] = None
    open_metadata: Annotated[
        bool,
        _http(
            "--open-metadata",
            help="Require no key on routes about the model, the server and its load, since some "
            "routers probe them without one. Only with --api-key.",
        ),
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        _http(
            "--allowed-host",
            help="A host name that clients and proxies may use for a server on the loopback "
            "address, or * for any. Repeatable. Other names with a dot are refused, against DNS "
            "rebinding.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _http(
            "--cors-origin",
            help="Origin of web pages that may use the API from a browser, such as "
            "https://chat.example.com or http://localhost:3000. Repeatable.",
        ),
    ] = None
    strict_max_tokens: Annotated[
        bool,
        _http(
            "--strict-max-tokens",
            help="Refuse a request whose max_tokens does not fit in the context after its prompt, "
            "instead of clamping it.",
        ),
    ] = False
    max_connections: Annotated[
        int,
        _http(
            help="Maximum open connections; beyond it idle ones are closed. The limit on open "
            "files may allow fewer."
        ),
    ] = 16_384
    drain_timeout: Annotated[
        float,
        _http(
            help="Seconds that running requests get to finish after SIGTERM or Ctrl-C. A second "
            "signal ends them with an error."
        ),
    ] = 30.0
    log_level: Annotated[str, _http(help="debug, info, warning or error.")] = "info"
    no_caffeinate: Annotated[
        bool,
        _http(
            "--no-caffeinate",
            help="On macOS, allow idle sleep while the service runs. Without this flag, caffeinate "
            "-i runs beside it.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFlags:
    fake_decode_rate: Annotated[
        float,
        _fake(
            help="Decode steps per second, each with a token per running request. 0: full speed."
        ),
    ] = 0.0
    fake_prefill_rate: Annotated[float, _fake(help="Prompt tokens per second. 0: full speed.")] = (
        0.0
    )
    fake_pool_tokens: Annotated[int, _fake(help="KV tokens. Unit: [bold]per worker[/bold].")] = (
        100_000
    )
    fake_vocab_size: Annotated[int, _fake(help="Size of the vocabulary.")] = 512
    fake_context_length: Annotated[int, _fake(help="Context length of the fake model.")] = 8192
    fake_hybrid: Annotated[
        bool,
        _fake("--fake-hybrid", help="Behave like a hybrid model: requests need auxiliary slots."),
    ] = False
    fake_seed: Annotated[int, _fake(help="Seed of the generated text.")] = 0
    fake_load_time: Annotated[float, _fake(help="Seconds that loading takes.")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFlags:
    remote_workers: Annotated[
        int,
        _remote(
            help="How many of the --dp-size workers run on other machines, each hosted by mlx-dp "
            "worker --rank R there. They have the last ranks: 1 of 3 is rank 2."
        ),
    ] = 0
    hostfile: Annotated[
        Path | None,
        _remote(
            help="Run all workers on the hosts of this file, one each. The format is mlx.launch's, "
            "which starts mlx-dp worker on each host's ssh name."
        ),
    ] = None
    launch: Annotated[
        bool,
        _remote(
            "--launch/--no-launch",
            help="Start mlx-dp worker on the hosts of --hostfile, or leave it to the user.",
        ),
    ] = True
    dist_init_addr: Annotated[
        str | None,
        _remote(
            "--dist-init-addr",
            help="host:port of this machine, to which workers on other machines connect.",
        ),
    ] = None
    keys: Annotated[
        Path | None,
        _remote(
            help="Directory of keys made by mlx-dp keys. Required unless --dist-init-addr is a "
            "loopback address."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A whole command line, grouped by subject."""

    model: ModelFlags
    owners: OwnerFlags
    queue: QueueFlags
    http: HttpFlags
    fake: FakeFlags
    remote: RemoteFlags
