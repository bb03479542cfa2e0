"""Reads request bodies, within bounds of size and time."""

import asyncio
from collections.abc import Callable
from typing import Final

from fastapi import Request
from starlette.types import Receive

from mlx_dp.orchestrator.openai.errors import ApiError

_JSON: Final = "application/json"


class ClientGoneError(Exception):
    """The client left before its answer was complete. Nobody is there to be told."""


async def read_json_body(
    request: Request, take: Callable[[int], None], *, max_nbytes: int, timeout_s: float
) -> bytes:
    """Return the body. Raises ApiError when it is no JSON by its type, too large or too slow.

    ``take`` hears of each chunk, and may raise.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON and not media_type.endswith("+json"):
        # Browsers send other types across origins without asking first.
        raise _final(415, f"the content type should be {_JSON}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        # A few kilobytes of gzip are gigabytes of zeros.
        raise _final(415, f"the content encoding {ascii(encoding)[:40]} is not supported")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_nbytes:
        raise _too_large(max_nbytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request.receive, take, max_nbytes)
    except TimeoutError as error:
        raise _final(408, f"the body did not arrive within {timeout_s:g} s") from error


async def _read(receive: Receive, take: Callable[[int], None], max_nbytes: int) -> bytes:
    chunks: list[bytes] = []
    nbytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        nbytes += len(chunk)
        if nbytes > max_nbytes:
            raise _too_large(max_nbytes)
        take(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_nbytes: int) -> ApiError:
    return _final(413, f"the body is larger than {max_nbytes} bytes")


def _final(status: int, message: str) -> ApiError:
    """An error after which the rest of the body is not read."""
    error = ApiError(status, message)
    error.headers["connection"] = "close"
    return error
