"""Paths of routes: their normal form, and which are open without a key or to pages (CORS)."""

import re
from collections.abc import Iterable
from typing import Final

_VERSION: Final = "/v1"
_ONE_MODEL: Final = re.compile(r"/+(?:v1/+)?models/(.*[^/].*)", re.DOTALL)
OPEN_PATHS: Final = frozenset({"/live", "/health", "/metrics"})
# Routers read these before they send anything, and without the key.
METADATA_PATHS: Final = frozenset(
    {
        "/get_load",
        "/get_model_info",
        "/get_server_info",
        "/model_info",
        "/server_info",
        "/v1/loads",
        "/v1/models",
        "/version",
    }
)
_MODEL_PREFIX: Final = "/v1/models/"
_READING: Final = ("GET", "HEAD")
# No administration: a page passes on to its site everything that it may read.
_SHARED_METADATA_PATHS: Final = frozenset(
    {"/v1/models", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
)


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


def is_open(method: str, path: str, *, open_metadata: bool) -> bool:
    """Whether a route needs no API key. All others do, unknown ones included."""
    if path in OPEN_PATHS:
        return True
    known = path in METADATA_PATHS or path.startswith(_MODEL_PREFIX)
    return open_metadata and known and method in _READING


class CrossOriginPaths:
    """The routes that pages of listed origins may call: text of all formats, models and tokens."""

    def __init__(self, generation_paths: Iterable[str]) -> None:
        self._paths: Final = _SHARED_METADATA_PATHS.union(generation_paths)

    def __contains__(self, path: str) -> bool:
        return path in self._paths or path.startswith(_MODEL_PREFIX)
