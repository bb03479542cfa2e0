"""Keeps web pages of other sites from a server that listens on loopback only.

Such a page runs in a browser on this machine. It can point its own name at 127.0.0.1 (DNS
rebinding), which shows in Host, or send requests blindly, which shows in Origin and in
Sec-Fetch-Site.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from mlx_dp.proto.wire.loopback import is_loopback

ANY_HOST = "*"
HOST_NAME: Final = re.compile(r"\*|[A-Za-z0-9._-]{1,253}")

# Names of the host machine inside of containers.
_CONTAINER_HOSTS: Final = ("host.docker.internal", "host.containers.internal")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class HostPolicy:
    """Decides by headers that pages cannot choose. Pure.

    Names without a dot and addresses are safe: no site can point them anywhere. ``hostname`` is
    this machine's own.
    """

    def __init__(self, allowed: Iterable[str], *, loopback: bool, hostname: str = "") -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._checks = loopback and ANY_HOST not in self._allowed
        own = hostname.lower().rstrip(".")
        named = (own, f"{own.partition('.')[0]}.local") if own else ()
        self._here = frozenset((*_CONTAINER_HOSTS, *named))

    def objection(
        self, headers: Mapping[bytes, bytes], *, listed: bool = False, shared: bool = True
    ) -> str | None:
        """Return why the request is refused, or None.

        ``shared``: the route is open to pages of listed origins. ``listed``: this is one of them.
        """
        if not self._checks:
            return None
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if host and not (self._own(host) or host in self._here or _is_address(host)):
            name = host if HOST_NAME.fullmatch(host) else "NAME"
            return (
                "this server listens on loopback only and does not accept the host name "
                f"{ascii(host)[:200]}: start it with --allowed-host {name} to let clients and "
                "proxies use that name"
            )
        origin = headers.get(b"origin")
        if origin is None:
            # Images and links send no origin.
            cross = headers.get(b"sec-fetch-site") == b"cross-site"
            return _BLIND_REQUEST if cross else None
        if listed or self._own_origin(origin.decode("latin-1")):
            return None
        return _foreign_page(origin.decode("latin-1"), shared=shared)

    def _own(self, host: str) -> bool:
        return "." not in host or host.endswith(".localhost") or host in self._allowed

    def _own_origin(self, origin: str) -> bool:
        if origin == "null":
            # Any sandboxed page has this origin.
            return False
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https"):
            # A page of an application or extension that the user installed.
            return True
        host = _name(rest)
        return bool(host) and (self._own(host) or is_loopback(host))


def normal_origin(text: str) -> str:
    """Return the origin as browsers send it: lower case, without a default port.

    Raises ValueError, with the form that is accepted, for what no browser sends.
    """
    if text == ANY_HOST:
        raise ValueError("it would open the server to every page: list the origins of your pages")
    scheme, divider, rest = text.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    origin = f"{scheme}://{authority}".lower()
    if not divider or not _ORIGIN.fullmatch(origin):
        raise ValueError(
            "give scheme, host and, unless it is the scheme's own, port, as the browser sends "
            "them: https://chat.example.com or http://localhost:3000"
        )
    parts = urlsplit(origin)
    host = parts.hostname or ""
    bracketed = f"[{host}]" if ":" in host else host
    # ``port`` raises a clear ValueError beyond 65535.
    named = "" if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    normal = f"{parts.scheme}://{bracketed}{named}"
    if authority != rest:
        raise ValueError(f"an origin ends after its host or port: give {normal}")
    return normal


def _foreign_page(origin: str, *, shared: bool) -> str:
    if not shared:
        return "pages of other sites may use routes for text, models and tokens, but not this one"
    try:
        normal = normal_origin(origin)
    except ValueError:
        return (
            "a page without an origin (a file, or a sandboxed frame) may not use this server: "
            "serve the page over HTTP, and start this server with --cors-origin and its origin"
        )
    return (
        f"pages of other sites may not use this server: start it with --cors-origin {normal} to "
        "open the routes for text, models and tokens to this one"
    )


_BLIND_REQUEST: Final = (
    "images, links and forms of other sites may not use this server: call it with fetch() from a "
    "page whose origin is listed with --cors-origin"
)


def _name(authority: str) -> str:
    """Return the host without its port, in lower case, or an empty string."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        # No browser sends this.
        return "unreadable.invalid"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
