"""Views of prompts for the response: their length, and on request their ids or text."""

from collections.abc import Sequence
from typing import Final

from mlx_dp.orchestrator.formats.common.api_format import EncodedIds, PromptView
from mlx_dp.orchestrator.formats.common.errors import too_long
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.http.stream.yield_budget import TOKEN_UNITS, TURN_UNITS, YieldBudget
from mlx_dp.orchestrator.text.text_model import TextModel
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, refusal

INLINE_TOKENS: Final = TURN_UNITS
"""Decoded at once: about a millisecond. A thread would not help, the tokenizer keeps the lock."""
_SLICE: Final = TURN_UNITS // TOKEN_UNITS


async def prompt_views(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    text: TextModel,
    limits: AdmissionLimits | None,
    budget: YieldBudget,
) -> Sequence[PromptView]:
    """Return a view of each prompt. Raises ApiError for one that exceeds the context."""
    ids: list[bytes | None] = [None] * len(prompts)
    if request.shows_token_ids:
        ids = [await _encoded(prompt, budget) for prompt in prompts]
    texts: list[str | None] = [None] * len(prompts)
    if request.shows_prompt:
        texts = [
            source
            if isinstance(source, str)
            else await _text(prompt, request, text, limits, budget)
            for source, prompt in zip(request.prompts, prompts, strict=True)
        ]
    return [
        PromptView(num_tokens=len(prompt), encoded_ids=encoded, text=shown)
        for prompt, encoded, shown in zip(prompts, ids, texts, strict=True)
    ]


async def _encoded(ids: Sequence[int], budget: YieldBudget) -> bytes:
    """Encode a prompt of up to a million ids as JSON, without delaying other answers."""
    encoded = EncodedIds()
    for at in range(0, len(ids), TURN_UNITS):
        await budget.spend(TURN_UNITS)
        encoded.extend(ids[at : at + TURN_UNITS])
    return encoded.array


async def _text(
    prompt: tuple[int, ...],
    request: GenerationRequest,
    text: TextModel,
    limits: AdmissionLimits | None,
    budget: YieldBudget,
) -> str:
    """Decode a prompt that came as token ids."""
    why = None if limits is None else refusal(limits, len(prompt), 1)
    if why is not None:
        # The service would refuse it later, after the work of decoding.
        raise too_long(request.names.prompt, why)
    skip = request.skip_special_tokens
    if len(prompt) <= INLINE_TOKENS:
        await budget.spend(len(prompt))
        return text.decode(prompt, skip_special_tokens=skip)
    detokenizer = text.detokenizer(skip_special_tokens=skip)
    pieces: list[str] = []
    for at in range(0, len(prompt), _SLICE):
        await budget.spend(TURN_UNITS)
        pieces.append(detokenizer.push(prompt[at : at + _SLICE]))
    return "".join([*pieces, detokenizer.finish()])
