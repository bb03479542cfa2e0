"""Malformed and oversized HTTP requests."""

import json
import random
from collections.abc import Iterator
from typing import Final

from scripts.faults.service.client import MODEL

HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
JSON: Final = b"Content-Type: application/json\r\n"

BAD_FIELDS: Final[tuple[dict[str, object], ...]] = (
    {"max_tokens": -2},
    {"max_tokens": 10**30},
    {"max_tokens": True},
    {"temperature": -0.5},
    {"temperature": "warm"},
    {"top_p": 0},
    {"n": 10**6},
    {"seed": 2**70},
    {"stop": [f"x{number}" for number in range(100)]},
    {"logit_bias": {"1000000": 1}},
    {"logprobs": 10**6},
    {"prompt": [-1]},
    {"prompt": [2**31]},
    {"prompt": [[["nested"]]]},
    {"prompt": []},
    {"prompt": None},
    {"model": "../../etc/passwd"},
    {"routed_dp_rank": 10**9},
)

BAD_JSON: Final = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'{"model": NaN}',
    b"\xff\xfe",
    b'{"prompt": "\\ud800", "model": "%s"}' % MODEL.encode(),
    b"[" * 100_000,
)


def with_body(body: bytes) -> bytes:
    return b"%s%sContent-Length: %d\r\n\r\n%s" % (HEAD, JSON, len(body), body)


def malformed_requests(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield requests by name. None may be served, and each must get a response."""
    yield "no host", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    yield "unknown route", b"GET /v1/secrets HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    yield "wrong method", b"DELETE /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for body in BAD_JSON:
        yield f"body {body[:20]!r}", with_body(body)
    for fields in BAD_FIELDS:
        asked = {"model": MODEL, "prompt": f"hello {rng.random()}", "max_tokens": 1, **fields}
        yield f"fields {fields}", with_body(json.dumps(asked).encode())


def broken_framing(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield malformed HTTP by name: the connection may be closed without a response."""
    yield "garbage", rng.randbytes(rng.randint(1, 2000)) + b"\r\n\r\n"
    yield (
        "length and chunks",
        HEAD + JSON + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    )
    yield "negative length", HEAD + JSON + b"Content-Length: -1\r\n\r\n"
    yield "bad chunk", HEAD + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n"
    yield "long header", HEAD + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n"
