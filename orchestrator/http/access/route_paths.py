"""Normalizes paths, before any decision depends on them."""

import re
from collections.abc import Iterable
from typing import Final

_VERSION: Final = "/v1"
_ONE_MODEL: Final = re.compile(r"/+(?:v1/+)?models/(.*[^/].*)", re.DOTALL)


class RoutePaths:
    """Maps the paths that clients write to those of routes. Pure.

    Base URLs come with extra slashes, and with or without the version. A redirect would lose the
    body of a POST with some clients. Key, host and origin are checked on the result, so that no
    spelling of a path avoids the checks of its route.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        known = frozenset(routes)
        versioned = (path for path in known if path.startswith(f"{_VERSION}/"))
        self._short: Final = {
            path.removeprefix(_VERSION): path
            for path in versioned
            if path.removeprefix(_VERSION) not in known
        }

    def canonical(self, path: str) -> str:
        """Return the route's own path. Names of models keep their slashes."""
        model = _ONE_MODEL.fullmatch(path)
        if model is not None:
            return f"{_VERSION}/models/{model[1]}"
        plain = "/" + "/".join(part for part in path.split("/") if part)
        return self._short.get(plain, plain)
