"""What an owner refuses before anything of a request comes near a model."""

from collections.abc import Iterator

from mlx_dp.proto.messages import Submit


def fault(submit: Submit, vocab_size: int) -> str | None:
    """Say what is wrong with a request in itself, or None.

    The controller has checked the ids as well. MLX reads foreign memory past a table's end, so
    that neither side relies on the other.
    """
    for field, ids in _token_ids(submit):
        # The codec lets no negative id pass.
        if ids and (worst := max(ids)) >= vocab_size:
            return f"{field}: token id {worst} is outside of the vocabulary of {vocab_size}"
    if len(submit.output_ids) >= submit.max_tokens:
        return (
            f"max_tokens is {submit.max_tokens}, and {len(submit.output_ids)} output_ids leave "
            "nothing to generate"
        )
    if submit.output_ids and submit.output_ids[-1] in submit.stop_token_ids:
        return f"output_ids end with the stop token {submit.output_ids[-1]}: the answer is complete"
    return None


def _token_ids(submit: Submit) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What indexes a table. Stop tokens do not: a model's own may lie beyond its logits."""
    yield "prompt_ids", submit.prompt_ids
    yield "output_ids", submit.output_ids
    yield "logit_bias", tuple(token for token, _ in submit.params.logit_bias)
