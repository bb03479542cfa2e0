"""What pages of listed origins may ask for from a browser (CORS)."""

from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# No administration: what a page may read, its site may read as well.
CROSS_ORIGIN_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
    }
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


def is_cross_origin(path: str) -> bool:
    """Whether a listed page may use this route."""
    return path in CROSS_ORIGIN_PATHS or path.startswith(_ONE_MODEL)


def for_listed_origins(app: ASGIApp, origins: frozenset[str]) -> CORSMiddleware:
    """Answer preflights, and put the headers on all else that the app says, errors included.

    Without credentials, since a browser has none for us: keys are sent by the page's own code.
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
