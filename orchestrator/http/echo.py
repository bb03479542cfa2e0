"""The text of prompts, for answers that begin with it."""

from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.http.errors import too_long
from mlx_dp.orchestrator.http.loop_share import TURN_UNITS, LoopShare
from mlx_dp.orchestrator.http.slices import TOKEN_UNITS
from mlx_dp.orchestrator.openai.completion_request import CompletionRequest, Prompt
from mlx_dp.orchestrator.text.text_model import TextModel
from mlx_dp.proto.admission import AdmissionLimits, refusal

INLINE_TOKENS: Final = TURN_UNITS
"""Decoded at once: about a millisecond. No thread helps with more, the tokenizer keeps the lock."""
_SLICE: Final = TURN_UNITS // TOKEN_UNITS


async def echoes(
    fields: CompletionRequest, text: TextModel, limits: AdmissionLimits | None, share: LoopShare
) -> Sequence[str]:
    """Return the text of each answer's prompt. Raises ApiError for one that nobody could run."""
    found: list[str] = []
    for prompt in fields.prompt:
        shown = await _text(
            prompt, text, limits, share, skip=fields.skip_special_tokens is not False
        )
        found += [shown] * fields.choices
    return found


async def _text(
    prompt: Prompt,
    text: TextModel,
    limits: AdmissionLimits | None,
    share: LoopShare,
    *,
    skip: bool,
) -> str:
    if isinstance(prompt, str):
        return prompt
    why = None if limits is None else refusal(limits, len(prompt), 1)
    if why is not None:
        # It would be refused all the same once it is submitted, but has its text by then.
        raise too_long("prompt", why)
    if len(prompt) <= INLINE_TOKENS:
        await share.take(len(prompt))
        return text.decode(prompt, skip_special_tokens=skip)
    detokenizer = text.detokenizer(skip_special_tokens=skip)
    pieces: list[str] = []
    for at in range(0, len(prompt), _SLICE):
        await share.take(TURN_UNITS)
        pieces.append(detokenizer.push(prompt[at : at + _SLICE]))
    return "".join([*pieces, detokenizer.finish()])
