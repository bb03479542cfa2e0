"""One spelling for every route, before anything is decided by its path."""

import re
from collections.abc import Iterable
from typing import Final

_VERSION: Final = "/v1"
_ONE_MODEL: Final = re.compile(r"/+(?:v1/+)?models/(.*[^/].*)", re.DOTALL)


class RoutePaths:
    """Paths as clients write them, to paths as routes have them. Pure.

    Base URLs come with a slash too many, and with or without the version. A redirect would cost
    some clients the body of their POST. Key, host and origin are checked on what this returns, so
    that no spelling passes another check than its route.
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
        """The route's own path; names of models keep their slashes."""
        model = _ONE_MODEL.fullmatch(path)
        if model is not None:
            return f"{_VERSION}/models/{model[1]}"
        plain = "/" + "/".join(part for part in path.split("/") if part)
        return self._short.get(plain, plain)
