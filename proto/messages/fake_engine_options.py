"""Options of the engine that needs no model."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mlx_dp.proto.fields import Seconds


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
