"""What every request passes: the key, the headers that name it, and the count of its answer.

Pure ASGI: a middleware that wraps responses would hide from a stream that its client has left.
"""

import hashlib
import hmac
import re
import uuid
from collections import Counter
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_dp.orchestrator.http.errors import error_response
from mlx_dp.orchestrator.openai.errors import ApiError

# All other routes need the key when there is one, unknown ones included.
OPEN_PATHS: Final = frozenset({"/live", "/health", "/metrics"})

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@=/+-]{1,128}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE: Final = re.compile(rb"[\x21-\x7e \t]{1,512}")
_PASSED_BACK: Final = {b"traceparent": _TRACE_PARENT, b"tracestate": _TRACE_STATE}


class Edge:
    """Checks the key and gives each request an id, which is in ``scope["state"]`` too.

    The id is the client's if it is harmless, and a fresh one otherwise. It only ever labels.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, posts: Counter[int]) -> None:
        self._app = app
        self._posts = posts
        self._key_digest = None if api_key is None else _digest(_raw(api_key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        added = [(b"x-request-id", request_id)]
        for name, allowed in _PASSED_BACK.items():
            if name in headers and allowed.fullmatch(headers[name]):
                added.append((name, headers[name]))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
                if scope["method"] == "POST":
                    self._posts[message["status"]] += 1
            await send(message)

        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy that believes the other one would take the rest for a request of its own.
            error = ApiError(400, "send either Content-Length or Transfer-Encoding, not both")
            error.headers["connection"] = "close"
            await error_response(error)(scope, receive, send_named)
            return
        if self._allowed(scope["path"], headers.get(b"authorization", b"")):
            await self._app(scope, receive, send_named)
            return
        error = ApiError(401, "a valid API key is needed: Authorization: Bearer <key>")
        error.code = "invalid_api_key"
        error.headers["www-authenticate"] = "Bearer"
        await error_response(error)(scope, receive, send_named)

    def _allowed(self, path: str, authorization: bytes) -> bool:
        if self._key_digest is None or path in OPEN_PATHS:
            return True
        scheme, _, key = authorization.partition(b" ")
        # Digests have one length, so the comparison tells nothing about the key.
        given = _digest(key.strip())
        return hmac.compare_digest(given, self._key_digest) and scheme.lower() == b"bearer"


def _raw(key: str) -> bytes:
    """The bytes that a client sends: key files end with a line break, and need not be UTF-8."""
    return key.encode(errors="surrogateescape").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
