"""From a body's bytes to its fields, without holding up the answers that run."""

import asyncio
import signal
import sys
from typing import Final, TypeVar

import msgspec
from pydantic import ValidationError

from mlx_dp.orchestrator.http.wait_room import LIMIT_S, WaitRoom
from mlx_dp.orchestrator.openai.condensed_body import (
    KINDS,
    CondensedBody,
    Kind,
    Refusal,
    restored,
)
from mlx_dp.orchestrator.openai.errors import ApiError, from_validation
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.process.held_signals import run_short_child

INLINE_NBYTES: Final = 256 * 2**10
"""A body up to this is parsed at once, whatever is in it."""
INLINE_SIGNS: Final = 2**15
"""A larger one too, if it has no more commas and brackets: it is mostly text then."""
INLINE_TEXT_NBYTES: Final = 4 * 2**20
"""Unless it is larger than this: text takes 9 ms for each MiB."""
MAX_SIGNS: Final = 2**21
"""Twice as many as the longest prompt has token ids."""
CHILDREN: Final = 2

_SIGNS: Final = (b",", b"[", b"{")
_COMMAND: Final = (sys.executable, "-m", "mlx_dp.orchestrator.openai.condensing_child")

Fields = TypeVar("Fields", bound=GenerationFields)


class BodyParser:
    """Parses bodies of many values in child processes, few at a time, and all others here."""

    def __init__(
        self, command: tuple[str, ...] = _COMMAND, *, wait_limit_s: float = LIMIT_S
    ) -> None:
        self._command = command
        self._children = asyncio.Semaphore(CHILDREN)
        self._room = WaitRoom("large bodies", limit_s=wait_limit_s)

    async def fields(self, kind: type[Fields], body: bytes) -> Fields:
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
        match await self._condensed(_name(kind), body):
            case Refusal() as refusal:
                raise refusal.error()
            case condensed:
                return restored(kind, condensed)

    async def _condensed(self, kind: Kind, body: bytes) -> CondensedBody | Refusal:
        async with self._room.wait():
            await self._children.acquire()
        condensing = asyncio.ensure_future(asyncio.to_thread(self._run, kind, body))
        # The child outlives a client that hangs up, and counts until it has ended.
        condensing.add_done_callback(lambda _: self._children.release())
        return await asyncio.shield(condensing)

    def _run(self, kind: Kind, body: bytes) -> CondensedBody | Refusal:
        ended = run_short_child((*self._command, kind), body)
        if ended.returncode == -signal.SIGALRM:
            return Refusal(
                status=413, message="the body takes too long to parse", param=None, code=None
            )
        if ended.returncode:
            raise RuntimeError(
                f"parsing a body of {len(body)} bytes ended with status {ended.returncode}: "
                f"{ended.stderr.decode(errors='replace')[-2000:]}"
            )
        made: CondensedBody | Refusal = msgspec.msgpack.decode(
            ended.stdout, type=CondensedBody | Refusal
        )
        return made


def _name(kind: type[GenerationFields]) -> Kind:
    return next(name for name, known in KINDS.items() if known is kind)
