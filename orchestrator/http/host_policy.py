"""Whom a web page may not reach: an endpoint of this machine alone, behind its user's back.

A page of a stranger runs in a browser on this machine. It can point a name of its own at
127.0.0.1 (DNS rebinding), which shows in Host, and it can send to us blindly, which shows in
Origin and in Sec-Fetch-Site.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from mlx_dp.proto.loopback import is_loopback

ANY_HOST = "*"


class HostPolicy:
    """Decides by the headers that browsers do not let a page choose. Pure.

    Names without a dot are not a stranger's to point anywhere, and an address is no name.
    """

    def __init__(self, allowed: Iterable[str], *, loopback: bool) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._checks = loopback and ANY_HOST not in self._allowed

    def objection(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Say why the request is refused, or nothing."""
        if not self._checks:
            return None
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if host and not self._own(host) and not _is_address(host):
            return (
                f"this endpoint is for this machine alone and not for {ascii(host)[:200]}: start "
                f"it with --allowed-host NAME to let clients and proxies call it by a name"
            )
        origin = headers.get(b"origin")
        if origin is not None:
            return None if self._own_origin(origin.decode("latin-1")) else _FOREIGN_PAGE
        # Images and links send no origin.
        return _FOREIGN_PAGE if headers.get(b"sec-fetch-site") == b"cross-site" else None

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


_FOREIGN_PAGE = (
    "pages of other sites may not use this endpoint: start it with --allowed-host NAME if the "
    "site is yours"
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
