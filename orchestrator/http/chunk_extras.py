"""What a request's answers show beside text, made ready for their format."""

from collections.abc import Sequence

from mlx_dp.orchestrator.http.choices import Work
from mlx_dp.orchestrator.http.loop_share import TURN_UNITS, LoopShare
from mlx_dp.orchestrator.openai.chunk_extras import ChunkExtras
from mlx_dp.orchestrator.openai.token_ids import EncodedIds


async def chunk_extras(work: Work, share: LoopShare) -> ChunkExtras:
    """Return the extras of all choices of a request."""
    fields = work.fields
    each = range(fields.choices)
    prompt_ids = None
    if fields.return_token_ids:
        encoded = [await _encoded(ids, share) for ids in work.prompts]
        prompt_ids = [ids for ids in encoded for _ in each]
    return ChunkExtras(
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        prompt_tokens=[len(ids) for ids in work.prompts for _ in each],
        prompt_ids=prompt_ids,
    )


async def _encoded(ids: Sequence[int], share: LoopShare) -> bytes:
    """Encode a prompt as JSON, which may have a million ids, without holding up the answers."""
    encoded = EncodedIds()
    for at in range(0, len(ids), TURN_UNITS):
        await share.take(TURN_UNITS)
        encoded.extend(ids[at : at + TURN_UNITS])
    return encoded.array
