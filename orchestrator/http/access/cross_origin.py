"""The routes that pages of listed origins may call from a browser (CORS)."""

from collections.abc import Iterable
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# No administration: a page passes on to its site everything that it may read.
_METADATA_PATHS: Final = frozenset(
    {"/v1/models", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
)
_ONE_MODEL: Final = "/v1/models/"
_EXPOSED: Final = (
    "x-dp-rank",
    "x-routing-reason",
    "x-request-id",
    "retry-after",
    "traceparent",
    "tracestate",
)


class CrossOriginPaths:
    """Generation routes of all formats, models and tokens."""

    def __init__(self, generation_paths: Iterable[str]) -> None:
        self._paths: Final = _METADATA_PATHS.union(generation_paths)

    def __contains__(self, path: str) -> bool:
        return path in self._paths or path.startswith(_ONE_MODEL)


def for_listed_origins(app: ASGIApp, origins: frozenset[str]) -> CORSMiddleware:
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
