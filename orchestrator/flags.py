"""The flags of ``mlx-dp serve`` and ``mlx-dp plan``, declared once, as the user gave them.

Nothing is validated here beyond the type: see configuration.py.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from mlx_dp.orchestrator.remote_flags import RemoteFlags
from mlx_dp.proto.group import DistributedBackend
from mlx_dp.proto.messages import EngineKind

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
            help="The most tokens of one request, prompt and answer together, in every replica "
            "mode. Default: the model's own limit."
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _model(
            "--served-model-name",
            help="The name that clients ask for; several may follow, or the flag be given again. "
            "Answers carry the first. The model's own path and hub id are names too. Default: the "
            "model's own name.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        _model(
            metavar="FILE",
            help="A jinja file in place of the model's own chat template, for a model that has "
            "none or a broken one.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        _model(
            "--trust-remote-code",
            help="Run Python code that comes with the model, for architectures and tokenizers that "
            "have their own. It can do whatever you can do on this machine: read it before.",
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
            help="How many owners serve requests: each holds its own request slots, KV tokens and "
            "auxiliary states, in a process of its own.",
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
            help="One group of processes that computes in lockstep, in place of independent "
            "replicas: each owner keeps attention and its own requests, and holds 1/tp_size of the "
            "MLP and expert weights. For models whose weights do not fit --dp-size times: where "
            "they do, replicas never wait for each other. Limits count for the whole group.",
        ),
    ] = False
    distributed_backend: Annotated[
        DistributedBackend | None,
        _owners(
            "--distributed-backend",
            help="What the processes of a dp-attention group compute over: ring (TCP, the "
            "default), jaccl (Thunderbolt with RDMA) or nccl (CUDA). MLX must have been "
            "built with it. Only with --enable-dp-attention.",
        ),
    ] = None
    enable_dp_lm_head: Annotated[
        bool,
        _owners(
            "--enable-dp-lm-head",
            help="Divide the embedding and the LM head over the vocabulary too: less memory per "
            "process where the vocabulary is large, for one more exchange per step. Only with "
            "--enable-dp-attention.",
        ),
    ] = False
    max_running_requests: Annotated[
        int | None,
        _owners(
            help=f"Requests decoded at the same time. {_PER_OWNER} Default: half the KV tokens, at "
            "most 4096 per owner."
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        _owners(
            help="KV tokens. Unit: [bold]per worker[/bold] in both modes, never divided. Default: "
            "what its memory holds; a larger value is cut to that."
        ),
    ] = None
    max_mamba_cache_size: Annotated[
        int | None,
        _owners(
            help=f"Auxiliary-state slots of a hybrid model. {_PER_OWNER} One running request needs "
            "4 of them, or 1 with --disable-radix-cache. Default: as many as the request slots "
            "need."
        ),
    ] = None
    mem_fraction_static: Annotated[
        float,
        _owners(
            help="The part of the device that [bold]all workers together[/bold] may use for "
            "weights, KV and states; it is shared out evenly. On a CPU the device is half of the "
            "RAM."
        ),
    ] = 0.8
    chunked_prefill_size: Annotated[
        int,
        _owners(
            help="Prompt tokens computed between two decode steps. Unit: [bold]per worker[/bold], "
            "or [bold]for the whole group[/bold] with --enable-dp-attention, where each owner gets "
            "1/dp_size, since a step lasts as long as all of them take. Smaller keeps running "
            "streams smooth, larger finishes long prompts sooner."
        ),
    ] = 512
    disable_radix_cache: Annotated[
        bool,
        _owners("--disable-radix-cache", help="Do not keep prompt prefixes for later requests."),
    ] = False
    max_restarts: Annotated[
        int,
        _owners(
            help="Restarts within --restart-window, after which a worker counts as failed. Unit: "
            "[bold]per worker[/bold]."
        ),
    ] = 5
    restart_window: Annotated[
        float, _owners(help="Seconds within which --max-restarts is counted.")
    ] = 60.0
    start_timeout: Annotated[
        float | None,
        _owners(
            help="Seconds that a worker may take to load its model before it is started anew. "
            "Default: 600, and as long as its weights take to be read at 20 MB/s."
        ),
    ] = None
    hang_timeout: Annotated[
        float,
        _owners(
            help="Seconds without a sign of progress after which a worker is killed and replaced. "
            "While it computes a prompt it gets more, by the pace that it has measured. From "
            "2 to 3600."
        ),
    ] = 10.0
    # Hidden: the defaults suit every model, and trials of faults need shorter times.
    heartbeat_interval: Annotated[
        float, _owners(hidden=True, help="Seconds between two heartbeats of a worker.")
    ] = 0.5
    restart_delay: Annotated[
        float,
        _owners(
            hidden=True,
            help="Seconds before the first restart; doubled for each further one, up to 120 times.",
        ),
    ] = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFlags:
    load_balance_method: Annotated[
        str,
        _queue(
            help="Which owner gets a request when several have room: round_robin, total_requests "
            "(fewest running), total_tokens (fewest tokens in use) or prefix_affinity (least to "
            "compute: where most of the prompt is cached, unless that owner is busier)."
        ),
    ] = "total_tokens"
    max_queued_requests: Annotated[
        int,
        _queue(
            help="Requests that wait for a slot; beyond it a client gets 429. Unit: [bold]the "
            "whole service[/bold] in both modes, since there is one queue."
        ),
    ] = 1024
    queue_timeout: Annotated[
        float, _queue(help="Seconds that one request may wait in the queue.")
    ] = 300.0
    request_timeout: Annotated[float, _queue(help="Seconds that one request may take in all.")] = (
        3600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFlags:
    host: Annotated[str, _http(help="Address to listen on; 0.0.0.0 for every network.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _http(help="Port to listen on; 0 takes a free one and prints it.")] = 8000
    api_key: Annotated[
        str | None,
        _http(
            envvar=API_KEY_VARIABLE,
            help="What clients must send as bearer token. Better given in the environment, where "
            "other users of the machine cannot read it.",
        ),
    ] = None
    open_metadata: Annotated[
        bool,
        _http(
            "--open-metadata",
            help="Ask for no key on routes that tell of the model, the server and its load: some "
            "routers probe them without one. Only with --api-key.",
        ),
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        _http(
            "--allowed-host",
            help="A name that clients and proxies may call an endpoint on the loopback address "
            "by, or * for any; may be given again. Names with a dot are refused otherwise, since "
            "a web page can point its own here.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _http(
            "--cors-origin",
            help="Origin of web pages that may ask for text, models and tokens from a browser, "
            "such as https://chat.example.com or http://localhost:3000; may be given again.",
        ),
    ] = None
    strict_max_tokens: Annotated[
        bool,
        _http(
            "--strict-max-tokens",
            help="Refuse a request whose max_tokens is more than its prompt leaves of the context, "
            "in place of ending its answer there.",
        ),
    ] = False
    max_connections: Annotated[
        int,
        _http(
            help="Connections open at the same time; beyond it idle ones are closed. The limit "
            "on open files may allow fewer."
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
            help="On macOS, let the machine go to sleep by itself while the service runs. Without "
            "this flag, caffeinate -i runs beside it.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFlags:
    fake_decode_rate: Annotated[
        float,
        _fake(help="Steps per second; each gives a token to every running request. 0: full speed."),
    ] = 0.0
    fake_prefill_rate: Annotated[float, _fake(help="Prompt tokens per second. 0: full speed.")] = (
        0.0
    )
    fake_pool_tokens: Annotated[int, _fake(help="KV tokens. Unit: [bold]per worker[/bold].")] = (
        100_000
    )
    fake_vocab_size: Annotated[int, _fake(help="Token ids that exist.")] = 512
    fake_context_length: Annotated[
        int, _fake(help="Context length of the model that is not there.")
    ] = 8192
    fake_hybrid: Annotated[
        bool,
        _fake("--fake-hybrid", help="Behave like a hybrid model: requests need auxiliary slots."),
    ] = False
    fake_seed: Annotated[int, _fake(help="Another seed gives other answers.")] = 0
    fake_load_time: Annotated[float, _fake(help="Seconds that loading takes.")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A whole command line, by subject."""

    model: ModelFlags
    owners: OwnerFlags
    queue: QueueFlags
    http: HttpFlags
    fake: FakeFlags
    remote: RemoteFlags
