"""Commands: messages of the controller to a worker, ``Down`` in all, and the values in them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from mlx_dp.proto.capacity.model_shape import Count
from mlx_dp.proto.capacity.ownership import OwnerSlice
from mlx_dp.proto.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_REQUEST_TOKENS,
    MAX_STOP_TOKEN_IDS,
    Epoch,
    RequestId,
    Seconds,
    Text,
    TokenId,
    TokenIds,
)
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.proto.messages.sampling_params import SamplingParams


class EngineKind(StrEnum):
    MLX = "mlx"
    FAKE = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineOptions:
    """The behaviour of the engine that needs no model. A rate of 0 means full speed."""

    decode_tokens_per_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """Steps per second; each step yields one token for every running request."""
    prefill_tokens_per_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    pool_tokens: Annotated[int, Meta(ge=1, lt=2**53)] | None = 100_000
    vocab_size: Annotated[int, Meta(ge=2, lt=2**31)] = 512
    context_length: Annotated[int, Meta(ge=2, lt=2**31)] = 8192
    hybrid: bool = False
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    load_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Controller to worker: load the model and become ready, with this share."""

    tag: ClassVar[str] = "start"

    engine: EngineKind
    model_path: Text
    share: OwnerSlice
    memory_nbytes: Count | None
    """This worker's share of the device; None leaves MLX's own limits."""
    context_length: Annotated[int, Meta(ge=1, lt=2**31)] | None
    chunked_prefill_size: Annotated[int, Meta(ge=1, lt=2**31)]
    """This worker's share."""
    prefix_cache: bool
    heartbeat_interval_s: Annotated[float, Meta(gt=0.0, le=3600.0)]
    fake: FakeEngineOptions = FakeEngineOptions()
    group: GroupPlace | None = None
    """None: this worker is not part of a group."""
    trust_remote_code: bool = False
    """Whether code in the model directory may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Controller to worker: run this request. Delivery is certain only after ``Accepted``.

    ``output_ids`` are tokens that an earlier owner already emitted: they are prefilled after the
    prompt, count as answer for penalties and positions, and are never sent again.
    """

    tag: ClassVar[str] = "submit"

    request_id: RequestId
    epoch: Epoch
    prompt_ids: Annotated[TokenIds, Meta(min_length=1)]
    output_ids: TokenIds = ()
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    """The limit of the whole answer, ``output_ids`` included."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    params: SamplingParams = SamplingParams()
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] = ""
    """Requests share cached prefixes only with requests of the same salt."""
    grammar: Grammar | None = None
    """The grammar that the answer must match; the answer begins with ``output_ids``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Controller to worker: end this request. An unknown or finished request is no error."""

    tag: ClassVar[str] = "abort"

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Controller to worker: drop all cached prefixes that no running request needs."""

    tag: ClassVar[str] = "flush"

    flush_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Controller to worker: reject new requests, finish the running ones."""

    tag: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Controller to worker: stop at once and exit 0."""

    tag: ClassVar[str] = "shutdown"


Down = Start | Submit | Abort | Flush | Drain | Shutdown
"""Every command. The codec decodes these and no others."""
