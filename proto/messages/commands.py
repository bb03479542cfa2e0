"""Commands: messages of a controller to a worker. See ``messages``."""

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
    Text,
    TokenId,
    TokenIds,
)
from mlx_dp.proto.messages.fake_engine_options import FakeEngineOptions
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.proto.messages.sampling_params import SamplingParams


class EngineKind(StrEnum):
    MLX = "mlx"
    FAKE = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Controller to worker: load and become ready, as this slice of the whole."""

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
    """None: this worker computes alone."""
    trust_remote_code: bool = False
    """Whether the model may bring code that is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Controller to worker: run this request. It is delivered only once ``Accepted``.

    ``output_ids`` are tokens that an earlier owner already emitted: they are prefilled behind the
    prompt, count as answer for penalties and positions, and are never sent again.
    """

    tag: ClassVar[str] = "submit"

    request_id: RequestId
    epoch: Epoch
    prompt_ids: Annotated[TokenIds, Meta(min_length=1)]
    output_ids: TokenIds = ()
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    """Of the whole answer, ``output_ids`` included."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    params: SamplingParams = SamplingParams()
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] = ""
    """Requests share cached prefixes only with those of the same salt."""
    grammar: Grammar | None = None
    """What the answer must match; ``output_ids`` are its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Controller to worker: forget this request; unknown or finished ones are no error."""

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
    """Controller to worker: accept nothing more, finish what runs."""

    tag: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Controller to worker: stop at once and exit 0."""

    tag: ClassVar[str] = "shutdown"
