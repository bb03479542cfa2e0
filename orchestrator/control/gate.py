"""What is refused before it is queued, so that nothing harmful comes near a worker."""

from collections.abc import Iterator

import msgspec

from mlx_dp.orchestrator.service import CONTEXT_LENGTH_EXCEEDED, Generation, RefusedError
from mlx_dp.proto.admission import AdmissionLimits, answer_tokens, fits, refusal
from mlx_dp.proto.fields import MAX_CACHE_SALT_CHARS, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID
from mlx_dp.proto.sampling_params import SamplingParams


def check_rank(rank: int | None, num_owners: int) -> None:
    """Raises RefusedError for a rank that does not exist."""
    if rank is not None and not 0 <= rank < num_owners:
        raise RefusedError(
            f"routed_dp_rank is {rank}, but there are {num_owners} owners: use 0 to "
            f"{num_owners - 1}, or leave it out",
            param="routed_dp_rank",
        )


def certain_max_tokens(
    generation: Generation, limits: AdmissionLimits, *, strict: bool
) -> int | None:
    """The answer's length, if it is known before an owner is: None is what that one has left.

    Raises RefusedError when the prompt alone is too long, or with ``strict`` both together.
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
    # An owner with less room may have one that asks for more than any has.
    return asked if asked == max_tokens else None


def check_generation(generation: Generation, vocab_size: int) -> None:
    """Raises RefusedError for what no owner could take, however short it is.

    A worker drops a message that breaks a bound of the protocol, and would be taken for dead
    because of it: so all of those bounds are checked here, whatever the edge has checked.
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
    """Each parameter's ids, and the largest that it may have."""
    yield "prompt", generation.prompt_ids, vocab_size - 1
    # Only compared with what is drawn: a model's own may lie beyond its logits.
    yield "stop_token_ids", generation.stop_token_ids, MAX_TOKEN_ID
    bias = generation.params.logit_bias
    yield "logit_bias", tuple(token for token, _ in bias), vocab_size - 1
