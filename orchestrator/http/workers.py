"""GET /workers, and POST /workers/{n}/restart: the processes behind the owners."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from fastapi import Response

from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.openai.errors import ApiError
from mlx_dp.orchestrator.worker_states import RestartRefusedError, WorkerState

_INDEX: Final = re.compile(r"[0-9]{1,7}")


def workers(endpoint: Endpoint) -> Mapping[str, Any]:
    """The body of GET /workers."""
    now = time.time()
    return {"workers": [_worker(worker, now) for worker in endpoint.service.workers()]}


def restart(endpoint: Endpoint, name: str) -> Response:
    """202: the restart is planned, and GET /workers shows how far it is."""
    known = len(endpoint.service.workers())
    if not _INDEX.fullmatch(name) or int(name) >= known:
        message = f"there is no worker {ascii(name)[:40]}, workers are 0 to {known - 1}"
        raise ApiError(404, message, code="worker_not_found")
    try:
        concerned = endpoint.service.restart_worker(int(name))
    except RestartRefusedError as error:
        raise ApiError(409, str(error), code="restart_refused") from error
    return Response(
        msgspec.json.encode({"restarting": concerned}), 202, media_type="application/json"
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
