"""Routes for operators: the state and restart of workers, and POST /flush_cache."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from fastapi import Response

from mlx_dp.orchestrator.api import RETRY_ABSENT_S, FlushOutcome, OwnerFlush
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.http.routes.context import AppContext
from mlx_dp.orchestrator.worker_states import RestartRefusedError, WorkerState

_INDEX: Final = re.compile(r"[0-9]{1,7}")
_UNANSWERED: Final = frozenset({FlushOutcome.TIMEOUT, FlushOutcome.LOST})


def workers(context: AppContext) -> Mapping[str, Any]:
    """The body of GET /workers."""
    now = time.time()
    return {"workers": [_worker(worker, now) for worker in context.service.workers()]}


def restart_worker(context: AppContext, name: str) -> Response:
    """202: the restart is planned, and GET /workers shows its progress."""
    known = len(context.service.workers())
    if not _INDEX.fullmatch(name) or int(name) >= known:
        message = f"there is no worker {ascii(name)[:40]}, workers are 0 to {known - 1}"
        raise ApiError(404, message, code="worker_not_found")
    try:
        restarting = context.service.restart_worker(int(name))
    except RestartRefusedError as error:
        raise ApiError(409, str(error), code="restart_refused") from error
    return Response(
        msgspec.json.encode({"restarting": restarting}), 202, media_type="application/json"
    )


def _worker(worker: WorkerState, now: float) -> Mapping[str, Any]:
    return {
        "index": worker.index,
        "status": worker.status.value,
        "since": datetime.fromtimestamp(now - worker.status_s, UTC).isoformat(),
        "phase": worker.phase,
        "pid": worker.pid,
        "incarnation": worker.incarnation,
        "epoch": worker.epoch,
        "restarts": worker.restarts,
        "restarts_in_window": worker.restarts_in_window,
        "max_restarts": worker.max_restarts,
        "last_cause": worker.last_cause or None,
        "restart_asked": worker.restart_asked,
        "malformed_frames": worker.malformed_frames,
        "remote": worker.host != "",
        "host": worker.host or None,
        "batching": worker.batching,
        "unbatched_reason": worker.unbatched_reason or None,
    }


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
