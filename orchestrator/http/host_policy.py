"""Whom a web page may not reach: an endpoint of this machine alone, behind its user's back.

A page of a stranger runs in a browser on this machine. It can point a name of its own at
127.0.0.1 (DNS rebinding), which shows in Host, and it can send to us blindly, which shows in
Origin and in Sec-Fetch-Site.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from mlx_dp.proto.loopback import is_loopback

ANY_HOST = "*"
HOST_NAME: Final = re.compile(r"\*|[A-Za-z0-9._-]{1,253}")

# What containers call the machine that they run on.
_CONTAINER_HOSTS: Final = ("host.docker.internal", "host.containers.internal")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class HostPolicy:
    """Decides by the headers that browsers do not let a page choose. Pure.

    Names without a dot are not a stranger's to point anywhere, and an address is no name.
    ``hostname``: this machine's own.
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
        """Say why the request is refused, or nothing.

        ``shared``: its route is open to pages of listed origins, and ``listed``: to this one.
        """
        if not self._checks:
            return None
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if host and not (self._own(host) or host in self._here or _is_address(host)):
            name = host if HOST_NAME.fullmatch(host) else "NAME"
            return (
                f"this endpoint is for this machine alone and not for {ascii(host)[:200]}: start "
                f"it with --allowed-host {name} to let clients and proxies call it by that name"
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
            # A page in a sandbox has no other, whoever made it.
            return False
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https"):
            # An application's own page, or an extension's: its user installed it.
            return True
        host = _name(rest)
        return bool(host) and (self._own(host) or is_loopback(host))


def normal_origin(text: str) -> str:
    """The origin as browsers send it: lower case, without a default port.

    Raises ValueError for what no browser sends, and says what would do.
    """
    if text == ANY_HOST:
        raise ValueError("it would open the endpoint to every page: list the origins of yours")
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
    # Beyond 65535, this says so itself.
    named = "" if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    normal = f"{parts.scheme}://{bracketed}{named}"
    if authority != rest:
        raise ValueError(f"an origin ends behind its host or port: give {normal}")
    return normal


def _foreign_page(origin: str, *, shared: bool) -> str:
    if not shared:
        return "pages of other sites may use routes for text, models and tokens, and not this one"
    try:
        normal = normal_origin(origin)
    except ValueError:
        return (
            "a page without an origin of its own (a file, or a sandboxed frame) may not use this "
            "endpoint: serve the page at an address, and start the endpoint with --cors-origin and "
            "that address"
        )
    return (
        f"pages of other sites may not use this endpoint: start it with --cors-origin {normal} to "
        "let this one ask for text, models and tokens"
    )


_BLIND_REQUEST: Final = (
    "images, links and forms of other sites may not use this endpoint: call it by fetch() from a "
    "page whose origin --cors-origin lists"
)


def _name(authority: str) -> str:
    """The host without its port, in lower case; empty if it is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        # No browser makes such a thing, and what is in it cannot be told.
        return "unreadable.invalid"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
