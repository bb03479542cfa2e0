"""Parses request bodies without delaying the answers that run."""

import asyncio
import signal
import sys
from typing import Final

import msgspec
from pydantic import ValidationError

from mlx_dp.orchestrator.formats.common.api_format import Body
from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.validation import from_validation
from mlx_dp.orchestrator.http.body.limits import MAX_WAIT_S, ConcurrencyLimit
from mlx_dp.orchestrator.http.body.packed_body import PackedBody, Refusal, class_path, unpack
from mlx_dp.orchestrator.process.stop_signals import run_short_child

INLINE_NBYTES: Final = 256 * 2**10
"""A body up to this size is always parsed in this process."""
INLINE_SIGNS: Final = 2**15
"""A larger one too, if it has no more commas and brackets: it is mostly text then."""
INLINE_TEXT_NBYTES: Final = 4 * 2**20
"""Unless it is larger than this: text takes 9 ms for each MiB."""
MAX_SIGNS: Final = 2**21
"""Twice as many as the longest prompt has token ids."""
CHILDREN: Final = 2

_SIGNS: Final = (b",", b"[", b"{")
_COMMAND: Final = (sys.executable, "-m", "mlx_dp.orchestrator.http.body.packed_body")


class BodyParser:
    """Parses bodies of many values in child processes, few at a time, and others in place."""

    def __init__(
        self, command: tuple[str, ...] = _COMMAND, *, wait_limit_s: float = MAX_WAIT_S
    ) -> None:
        self._command = command
        self._children = asyncio.Semaphore(CHILDREN)
        self._limit = ConcurrencyLimit("large bodies", limit_s=wait_limit_s)

    async def parse(self, kind: type[Body], body: bytes) -> Body:
        """Return the checked fields. Raises ApiError."""
        signs = 0
        if len(body) > INLINE_NBYTES:
            signs = sum(map(body.count, _SIGNS))
        if signs > MAX_SIGNS:
            raise ApiError(413, f"the body has more than {MAX_SIGNS} values")
        if signs <= INLINE_SIGNS and len(body) <= INLINE_TEXT_NBYTES:
            try:
                return kind.model_validate_json(body)
            except ValidationError as error:
                raise from_validation(error) from error
        match await self._packed(class_path(kind), body):
            case Refusal() as refusal:
                raise refusal.error()
            case packed:
                return unpack(kind, packed)

    async def _packed(self, kind: str, body: bytes) -> PackedBody | Refusal:
        async with self._limit.enter():
            await self._children.acquire()
        packing = asyncio.ensure_future(asyncio.to_thread(self._run_child, kind, body))
        # The child survives a disconnect, and holds its place until it has ended.
        packing.add_done_callback(lambda _: self._children.release())
        return await asyncio.shield(packing)

    def _run_child(self, kind: str, body: bytes) -> PackedBody | Refusal:
        ended = run_short_child((*self._command, kind), body)
        if ended.returncode == -signal.SIGALRM:
            return Refusal.from_error(ApiError(413, "the body takes too long to parse"))
        if ended.returncode:
            raise RuntimeError(
                f"parsing a body of {len(body)} bytes ended with status {ended.returncode}: "
                f"{ended.stderr.decode(errors='replace')[-2000:]}"
            )
        made: PackedBody | Refusal = msgspec.msgpack.decode(ended.stdout, type=PackedBody | Refusal)
        return made
