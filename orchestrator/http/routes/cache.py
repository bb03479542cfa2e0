"""POST /flush_cache, as in SGLang: every owner drops its cached prefixes."""

from typing import Final

import msgspec
from fastapi import Response

from mlx_dp.orchestrator.api import RETRY_ABSENT_S, FlushOutcome, OwnerFlush
from mlx_dp.orchestrator.http.routes.context import AppContext

_UNANSWERED: Final = frozenset({FlushOutcome.TIMEOUT, FlushOutcome.LOST})


async def flush_cache(context: AppContext) -> Response:
    """200 when at least one owner flushed and none failed to answer. Running requests continue."""
    results = await context.service.flush_cache(context.options.flush_timeout_s)
    unanswered = [result for result in results if result.outcome in _UNANSWERED]
    flushed = any(result.outcome is FlushOutcome.FLUSHED for result in results)
    success = flushed and not unanswered
    body = {
        "success": success,
        "num_tokens": sum(result.num_tokens for result in results),
        "nbytes": sum(result.nbytes for result in results),
        "owners": [_owner(result) for result in results],
    }
    headers = None if success else {"retry-after": str(RETRY_ABSENT_S)}
    return Response(
        msgspec.json.encode(body), 200 if success else 503, headers, media_type="application/json"
    )


def _owner(result: OwnerFlush) -> dict[str, object]:
    return {
        "dp_rank": result.dp_rank,
        "outcome": result.outcome.value,
        "num_tokens": result.num_tokens,
        "nbytes": result.nbytes,
    }
