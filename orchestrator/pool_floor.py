"""Whether the KV tokens that memory leaves to a worker are of use. One sum, in plan and serve."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.proto.ownership import OwnerSlice
from mlx_dp.proto.token_pool import MemoryDivision, divide_memory

LEAST_TOKENS: Final = 1024
"""A short chat with its answer. A worker that cannot hold one is of no use; a model whose
context is shorter needs no more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoom:
    """One worker's memory, and what came of it. ``asked_tokens``: --max-total-tokens."""

    share_nbytes: int
    workers: int
    memory: MemoryDivision
    context_length: int
    asked_tokens: int | None
    fewer: int | None = None
    """The most workers that would hold enough, where fewer of them would."""


def pool_warnings(room: WorkerRoom) -> tuple[str, ...]:
    """Warn of a pool that is smaller than the context.

    Raises ConfigError when it is too small for a chat, unless so few tokens were asked for.
    """
    tokens = room.memory.tokens
    if tokens is None or tokens >= room.context_length or tokens == room.asked_tokens:
        return ()
    least = min(LEAST_TOKENS, room.context_length)
    if tokens < least:
        raise ConfigError(_refusal(room, tokens, least))
    more = "fewer workers" if room.workers > 1 else "a smaller model"
    return (
        f"each worker holds {tokens:,} KV tokens, and the model's context is "
        f"{room.context_length:,}: longer requests are refused; {more} or a larger "
        "--mem-fraction-static would leave more",
    )


def fewer_workers(
    shares: list[int], shape: ModelShape, share: OwnerSlice, *, prefix_cache: bool, least: int
) -> int | None:
    """The most workers that hold ``least`` tokens each; ``shares[n - 1]`` is the share of n."""
    for count in range(len(shares), 0, -1):
        try:
            memory = divide_memory(shares[count - 1], shape, share, prefix_cache=prefix_cache)
        except ConfigError:
            continue
        if memory.tokens is None or memory.tokens >= least:
            return count
    return None


def _refusal(room: WorkerRoom, tokens: int, least: int) -> str:
    memory = room.memory
    states = f" and {_gb(memory.auxiliary_nbytes)} of states" if memory.auxiliary_nbytes else ""
    fewer = "" if room.fewer is None else f"--dp-size {room.fewer}, "
    count = "1 worker" if room.workers == 1 else f"{room.workers} workers"
    return (
        f"{count} with {_gb(room.share_nbytes)} each hold {tokens:,} KV tokens each, after "
        f"{_gb(memory.weights_nbytes)} of weights, {_gb(memory.overhead_nbytes)} for activations"
        f"{states}, and a chat needs {least:,}: use {fewer}a larger --mem-fraction-static or a "
        f"smaller model, or --max-total-tokens {tokens} if so few will do"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
