"""What every request passes: checks of path, host, origin and key, its id, the count of answers.

Pure ASGI: a middleware that wraps responses would hide from a stream that its client has left.
"""

import hashlib
import hmac
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_dp.orchestrator.http.cross_origin import for_listed_origins, is_cross_origin
from mlx_dp.orchestrator.http.errors import error_response
from mlx_dp.orchestrator.http.host_policy import HostPolicy
from mlx_dp.orchestrator.http.open_routes import is_open
from mlx_dp.orchestrator.http.route_paths import RoutePaths
from mlx_dp.orchestrator.openai.errors import ApiError
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.loopback import is_loopback

# The parser bounds what is incomplete, and one packet may complete more than that.
MAX_HEAD_NBYTES: Final = 64 * 2**10

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@=/+-]{1,128}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE: Final = re.compile(rb"[\x21-\x7e \t]{1,512}")
_PASSED_BACK: Final = {b"traceparent": _TRACE_PARENT, b"tracestate": _TRACE_STATE}


class Edge:
    """Checks path, host, origin and key, and gives each request an id, in ``scope["state"]`` too.

    The id is the client's if it is harmless, and a fresh one otherwise. It only ever labels.
    """

    def __init__(
        self, app: ASGIApp, options: HttpOptions, posts: Counter[int], routes: Iterable[str]
    ) -> None:
        self._app = app
        self._posts = posts
        self._paths = RoutePaths(routes)
        self._open_metadata = options.open_metadata
        self._hosts = HostPolicy(
            options.allowed_hosts, loopback=is_loopback(options.host), hostname=options.hostname
        )
        self._origins = frozenset(options.cors_origins)
        self._listed = for_listed_origins(self._checked, self._origins)
        key = options.api_key
        self._key_digest = None if key is None else _digest(_raw(key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The server's own scope stays as it is: its log says what was asked, and it sends no body
        # to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": self._paths.canonical(scope["path"])}
        headers: dict[bytes, bytes] = dict(scope["headers"])
        added = self._labels(scope, headers)
        shared = bool(self._origins) and is_cross_origin(scope["path"])
        listed = shared and self._lists(headers)
        if shared and not listed:
            # A cache must not give this answer to a page that is.
            added.append((b"vary", b"Origin"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
                if method == "POST":
                    self._posts[message["status"]] += 1
            await send(message)

        malformed = _malformed(scope, headers)
        app = self._listed if listed else self._checked
        if malformed is not None:
            # No page can make such a request, and what follows it may be another one.
            app = error_response(malformed)
        await app(scope, receive, send_named)

    def _labels(self, scope: Scope, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Headers of the answer that name the request."""
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        labels = [(b"x-request-id", request_id)]
        for name, allowed in _PASSED_BACK.items():
            if name in headers and allowed.fullmatch(headers[name]):
                labels.append((name, headers[name]))
        return labels

    def _lists(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(b"origin", b"").decode("latin-1") in self._origins

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope, dict(scope["headers"]))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _objection(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Why this client may not ask for this."""
        shared = is_cross_origin(scope["path"])
        why = self._hosts.objection(headers, listed=shared and self._lists(headers), shared=shared)
        if why is not None:
            error = _closing(403, why)
            error.code = "host_not_allowed"
            return error
        if self._allowed(scope, headers.get(b"authorization", b"")):
            return None
        # A stranger's body is not waited for.
        error = _closing(401, "a valid API key is needed: Authorization: Bearer <key>")
        error.code = "invalid_api_key"
        error.headers["www-authenticate"] = "Bearer"
        return error

    def _allowed(self, scope: Scope, authorization: bytes) -> bool:
        if self._key_digest is None:
            return True
        if is_open(scope["method"], scope["path"], open_metadata=self._open_metadata):
            return True
        scheme, _, key = authorization.partition(b" ")
        # Digests have one length, so the comparison tells nothing about the key.
        given = _digest(key.strip())
        return hmac.compare_digest(given, self._key_digest) and scheme.lower() == b"bearer"


def _malformed(scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
    """What is wrong with a request, whatever it asks for."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        # A proxy that believes the other one would take the rest for a request of its own.
        return _closing(400, "send either Content-Length or Transfer-Encoding, not both")
    if b"transfer-encoding" in headers and scope["http_version"] == "1.0":
        # Its proxies know no chunks, and would take them for requests.
        return _closing(400, "Transfer-Encoding needs HTTP/1.1")
    if _head_nbytes(scope) > MAX_HEAD_NBYTES:
        return _closing(431, f"the head is larger than {MAX_HEAD_NBYTES} bytes")
    return None


def _head_nbytes(scope: Scope) -> int:
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])


def _closing(status: int, message: str) -> ApiError:
    """An error after which the connection is of no use: the rest of what it sends is not read."""
    error = ApiError(status, message)
    error.headers["connection"] = "close"
    return error


def _raw(key: str) -> bytes:
    """The bytes that a client sends: key files end with a line break, and need not be UTF-8."""
    return key.encode(errors="surrogateescape").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
