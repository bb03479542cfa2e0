"""Admission: rejects what cannot be queued; overload (429, 503) apart from invalid input (400)."""

from collections.abc import Iterator
from typing import Final

import msgspec

from mlx_dp.orchestrator.api import (
    CONTEXT_LENGTH_EXCEEDED,
    RETRY_ABSENT_S,
    RETRY_BUSY_S,
    Generation,
    OverloadedError,
    RefusedError,
    ServiceStatus,
    queue_full_message,
)
from mlx_dp.orchestrator.control.state.counters import Counters
from mlx_dp.orchestrator.control.state.owner import Hold
from mlx_dp.orchestrator.control.state.rank_table import RankTable
from mlx_dp.orchestrator.control.state.request_queue import RequestQueue
from mlx_dp.orchestrator.control.workers.rolling_restart import RollingRestart
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens, fits, refusal
from mlx_dp.proto.fields import MAX_CACHE_SALT_CHARS, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID
from mlx_dp.proto.messages.sampling_params import SamplingParams


class Admission:
    """Decides whether a request may be queued. A rejection has a reason, and a time for a retry.

    A request for one rank waits for an owner that is being restarted on request, since its
    successor is already starting. It does not wait for a lost owner, whose return is uncertain.
    """

    def __init__(
        self,
        num_owners: int,
        ranks: RankTable,
        queue: RequestQueue,
        restarts: RollingRestart,
        counters: Counters,
        options: QueueOptions,
    ) -> None:
        self._num_owners: Final = num_owners
        self._ranks: Final = ranks
        self._queue: Final = queue
        self._restarts: Final = restarts
        self._counters: Final = counters
        self._strict: Final = options.strict_max_tokens

    def check(self, generation: Generation, status: ServiceStatus) -> int | None:
        """Return ``max_tokens`` if no owner would change it, see ``certain_max_tokens``.

        Raises OverloadedError or RefusedError.
        """
        rank = generation.routed_dp_rank
        try:
            check_rank(rank, self._num_owners)
            self._check_ready(rank, status)
            max_tokens = self._check_fit(generation)
        except RefusedError:
            self._counters.requests_refused["invalid"] += 1
            raise
        if self._queue.full:
            message = queue_full_message(len(self._queue), self._queue.limit)
            raise self._overloaded("queue_full", message, 429)
        return max_tokens

    def _check_ready(self, rank: int | None, status: ServiceStatus) -> None:
        match status:
            case ServiceStatus.READY | ServiceStatus.RESTARTING:
                pass
            case ServiceStatus.STARTING:
                raise self._overloaded("starting", "no worker is ready yet: try again soon", 503)
            case ServiceStatus.DRAINING:
                raise self._overloaded("draining", "the service is shutting down", 503)
            case ServiceStatus.DEAD:
                raise self._overloaded("dead", "all workers have failed", 503)
        if rank is None or self._restarts.is_replacing(rank):
            return
        owner = self._ranks.get(rank)
        if owner is None or Hold.CLOSED in owner.holds:
            raise self._overloaded("rank_not_ready", f"owner {rank} is not ready", 503)

    def _check_fit(self, generation: Generation) -> int | None:
        limits = self._ranks.limits_for(generation.routed_dp_rank)
        vocab_size = self._ranks.vocab_size()
        assert limits is not None, "admitted before any owner was ready"
        assert vocab_size is not None, "admitted before any owner was ready"
        max_tokens = certain_max_tokens(generation, limits, strict=self._strict)
        check_generation(generation, vocab_size)
        return max_tokens

    def _overloaded(self, reason: str, message: str, status: int) -> OverloadedError:
        self._counters.requests_refused[reason] += 1
        retry_after_s = RETRY_BUSY_S if status == 429 else RETRY_ABSENT_S
        return OverloadedError(message, status=status, retry_after_s=retry_after_s)


def check_rank(rank: int | None, num_owners: int) -> None:
    """Raise RefusedError for a rank that does not exist."""
    if rank is not None and not 0 <= rank < num_owners:
        raise RefusedError(
            f"routed_dp_rank is {rank}, but there are {num_owners} owners: use 0 to "
            f"{num_owners - 1}, or leave it out",
            param="routed_dp_rank",
        )


def certain_max_tokens(
    generation: Generation, limits: AdmissionLimits, *, strict: bool
) -> int | None:
    """Return the maximum output length; None if it depends on how much room the owner has left.

    Raises RefusedError if the prompt alone is too long, or with ``strict`` prompt and output
    together.
    """
    prompt_tokens, asked = len(generation.prompt_ids), generation.max_tokens
    max_tokens = (
        asked if strict and asked is not None else answer_tokens(limits, prompt_tokens, asked)
    )
    reason = refusal(limits, prompt_tokens, max_tokens)
    if reason is not None:
        param = "max_tokens" if fits(limits, prompt_tokens) and prompt_tokens else "prompt"
        code = None if fits(limits, prompt_tokens, max_tokens) else CONTEXT_LENGTH_EXCEEDED
        raise RefusedError(reason, param=param, code=code)
    # A clamped length is not certain: the request may go to a smaller owner, which clamps further.
    return asked if asked == max_tokens else None


def check_generation(generation: Generation, vocab_size: int) -> None:
    """Raise RefusedError for a request that no owner could run, however short it is.

    A worker drops a message that violates a bound of the protocol, and would then be replaced for
    ignoring a request. So every bound is checked here, even those that HTTP checks too.
    """
    if len(generation.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RefusedError(
            f"{len(generation.stop_token_ids)} stop token ids are too many: use at most "
            f"{MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    if len(generation.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise RefusedError(
            f"the cache salt has {len(generation.cache_salt)} characters: use at most "
            f"{MAX_CACHE_SALT_CHARS}",
            param="cache_salt",
        )
    for param, ids, most in _token_ids(generation, vocab_size):
        for worst in (max(ids, default=0), min(ids, default=0)):
            if not 0 <= worst <= most:
                raise RefusedError(f"token id {worst} does not exist: use 0 to {most}", param=param)
    try:
        msgspec.convert(msgspec.to_builtins(generation.params), SamplingParams)
    except (msgspec.ValidationError, ValueError) as error:
        raise RefusedError(str(error), param=None) from None


def _token_ids(
    generation: Generation, vocab_size: int
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield each parameter's name, its token ids, and the largest id that it may have."""
    yield "prompt", generation.prompt_ids, vocab_size - 1
    # Stop ids are only compared with sampled ids, and a model may name one beyond its logits.
    yield "stop_token_ids", generation.stop_token_ids, MAX_TOKEN_ID
    bias = generation.params.logit_bias
    yield "logit_bias", tuple(token for token, _ in bias), vocab_size - 1
