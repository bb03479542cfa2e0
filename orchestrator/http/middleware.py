"""Middleware for every request: path, host, origin, key and id; keep-alives end during a drain.

Pure ASGI: a middleware that wraps responses would hide a client's disconnect from its stream.
"""

import hashlib
import hmac
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_dp.orchestrator.api import Service, ServiceStatus
from mlx_dp.orchestrator.formats.common.errors import ApiError, closing, too_large
from mlx_dp.orchestrator.formats.table import FormatTable
from mlx_dp.orchestrator.http.access.host_policy import HostPolicy
from mlx_dp.orchestrator.http.access.route_paths import CrossOriginPaths, RoutePaths, is_open
from mlx_dp.orchestrator.http.connection.client_protocol import MAX_HEAD_NBYTES
from mlx_dp.orchestrator.http.errors import error_response
from mlx_dp.orchestrator.options import HttpOptions
from mlx_dp.proto.wire.loopback import is_loopback

_ENDING: Final = (ServiceStatus.DRAINING, ServiceStatus.DEAD)
_CLOSE: Final = (b"connection", b"close")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@=/+-]{1,128}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE: Final = re.compile(rb"[\x21-\x7e \t]{1,512}")
_PASSED_BACK: Final = {b"traceparent": _TRACE_PARENT, b"tracestate": _TRACE_STATE}
# Headers that pages of listed origins may read.
_EXPOSED: Final = (
    "x-dp-rank",
    "x-routing-reason",
    "x-request-id",
    "retry-after",
    "traceparent",
    "tracestate",
)


class RequestMiddleware:
    """Checks path, host, origin and key, and gives each request an id, in ``scope["state"]`` too.

    The id is the client's if it is harmless, and a random one otherwise. It only ever labels.
    ``routes``: the paths of the application's own routes.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: HttpOptions,
        formats: FormatTable,
        post_statuses: Counter[int],
        routes: Iterable[str],
    ) -> None:
        self._app = app
        self._formats = formats
        self._post_statuses = post_statuses
        self._paths = RoutePaths(routes)
        self._open_metadata = options.open_metadata
        self._hosts = HostPolicy(
            options.allowed_hosts, loopback=is_loopback(options.host), hostname=options.hostname
        )
        self._origins = frozenset(options.cors_origins)
        self._cross_origin = CrossOriginPaths(formats.paths)
        self._for_listed = _for_listed_origins(self._checked, self._origins)
        key = options.api_key
        self._key_digest = None if key is None else _digest(_raw(key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A copy: the server logs the original path, and sends no body in response to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": self._paths.canonical(scope["path"])}
        headers: dict[bytes, bytes] = dict(scope["headers"])
        added = self._labels(scope, headers)
        shared = bool(self._origins) and scope["path"] in self._cross_origin
        listed = shared and self._is_listed(headers)
        if shared and not listed:
            # A cache must not give this response to a page of a listed origin.
            added.append((b"vary", b"Origin"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
                if method == "POST":
                    self._post_statuses[message["status"]] += 1
            await send(message)

        malformed = _malformed(scope, headers)
        app = self._for_listed if listed else self._checked
        if malformed is not None:
            # No page can send such a request, so CORS headers are not needed.
            app = error_response(malformed, self._formats.format_for(scope["path"]))
        await app(scope, receive, send_named)

    def _labels(self, scope: Scope, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response that identify the request."""
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        labels = [(b"x-request-id", request_id)]
        for name, allowed in _PASSED_BACK.items():
            if name in headers and allowed.fullmatch(headers[name]):
                labels.append((name, headers[name]))
        return labels

    def _is_listed(self, headers: Mapping[bytes, bytes]) -> bool:
        return headers.get(b"origin", b"").decode("latin-1") in self._origins

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope, dict(scope["headers"]))
        if error is None:
            await self._app(scope, receive, send)
        else:
            response = error_response(error, self._formats.format_for(scope["path"]))
            await response(scope, receive, send)

    def _objection(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return an error if this client may not call this route."""
        shared = scope["path"] in self._cross_origin
        listed = shared and self._is_listed(headers)
        why = self._hosts.objection(headers, listed=listed, shared=shared)
        if why is not None:
            return closing(ApiError(403, why, code="host_not_allowed"))
        if self._is_authorized(scope, headers):
            return None
        # Closed, so that the body of an unknown client is never read.
        return closing(self._formats.format_for(scope["path"]).unauthorized())

    def _is_authorized(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        if self._key_digest is None:
            return True
        if is_open(scope["method"], scope["path"], open_metadata=self._open_metadata):
            return True
        key = self._formats.format_for(scope["path"]).api_key(headers)
        # Digests have equal lengths, so the time of the comparison says nothing about the key.
        matches = hmac.compare_digest(_digest(key or b""), self._key_digest)
        return matches and key is not None


class CloseWhenDraining:
    """Adds ``Connection: close`` to every response while the service drains.

    A client or balancer would otherwise keep its connection to a process that refuses the next
    request, and would lose that request when the process exits. Errors need the header too, so
    this is the outermost middleware.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_ending():
                kept = [pair for pair in message["headers"] if pair[0].lower() != _CLOSE[0]]
                message["headers"] = [*kept, _CLOSE]
            await send(message)

        await self._app(scope, receive, send_closing)

    def _is_ending(self) -> bool:
        return self._service.state().status in _ENDING


def _for_listed_origins(app: ASGIApp, origins: frozenset[str]) -> CORSMiddleware:
    """Answer preflights, and add the CORS headers to all other responses, errors included.

    Without credentials: browsers have none for this server, pages send keys in their own code.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
        allow_headers=("*",),
        # Chrome asks before a public page reaches a private address.
        allow_private_network=True,
        expose_headers=_EXPOSED,
    )


def _malformed(scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
    """Return an error for a request that is malformed, whatever its route."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        # A proxy that believes the other one would take the rest for a separate request.
        message = "send either Content-Length or Transfer-Encoding, not both"
        return closing(ApiError(400, message))
    if b"transfer-encoding" in headers and scope["http_version"] == "1.0":
        # Proxies of HTTP/1.0 know no chunks, and would take them for requests.
        return closing(ApiError(400, "Transfer-Encoding needs HTTP/1.1"))
    if _head_nbytes(scope) > MAX_HEAD_NBYTES:
        return too_large("head", MAX_HEAD_NBYTES, status=431)
    return None


def _head_nbytes(scope: Scope) -> int:
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])


def _raw(key: str) -> bytes:
    """Return the key as clients send it: key files end with a line break and need not be UTF-8."""
    return key.encode(errors="surrogateescape").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
