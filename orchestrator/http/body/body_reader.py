"""Reads request bodies, within bounds of size and time."""

import asyncio
from collections.abc import Callable
from typing import Final

from fastapi import Request
from starlette.types import Receive

from mlx_dp.orchestrator.formats.common.errors import ApiError, closing, too_large
from mlx_dp.orchestrator.http.connection.while_connected import ClientGoneError

_JSON: Final = "application/json"


async def read_json_body(
    request: Request, reserve: Callable[[int], None], *, max_nbytes: int, timeout_s: float
) -> bytes:
    """Return the body. Raises ApiError when its type is not JSON, or it is too large or too slow.

    ``reserve`` is called with the size of each chunk, and may raise.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON and not media_type.endswith("+json"):
        # Browsers send other types across origins without a preflight.
        raise closing(ApiError(415, f"the content type should be {_JSON}"))
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        # A few kilobytes of gzip can expand to gigabytes.
        message = f"the content encoding {ascii(encoding)[:40]} is not supported"
        raise closing(ApiError(415, message))
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_nbytes:
        raise too_large("body", max_nbytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request.receive, reserve, max_nbytes)
    except TimeoutError as error:
        raise closing(ApiError(408, f"the body did not arrive within {timeout_s:g} s")) from error


async def _read(receive: Receive, reserve: Callable[[int], None], max_nbytes: int) -> bytes:
    chunks: list[bytes] = []
    nbytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        nbytes += len(chunk)
        if nbytes > max_nbytes:
            raise too_large("body", max_nbytes)
        reserve(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
