"""Checks grammars before a request is queued."""

import asyncio
import signal
import sys
from collections import OrderedDict
from typing import Final

import msgspec

from mlx_dp.orchestrator.process.stop_signals import run_short_child
from mlx_dp.proto.messages.grammar import Grammar, complaint_line

CHILDREN: Final = 2
REMEMBERED: Final = 256
_COMMAND: Final = (sys.executable, "-m", "mlx_dp.orchestrator.text.grammar_child")
_CRASHES: Final = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class GrammarCheck:
    """Compiles each grammar once, in a child process, and caches the result.

    Clients send the same few grammars repeatedly.
    """

    def __init__(self, command: tuple[str, ...] = _COMMAND) -> None:
        self._command = command
        self._children = asyncio.Semaphore(CHILDREN)
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether ``fault`` will return at once."""
        return grammar in self._known

    async def fault(self, grammar: Grammar) -> str | None:
        """Return what is wrong with the grammar, on one line, or None."""
        if grammar not in self._known:
            self._known[grammar] = await self._check(grammar)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return self._known[grammar]

    async def _check(self, grammar: Grammar) -> str | None:
        await self._children.acquire()
        compiling = asyncio.ensure_future(asyncio.to_thread(self._compile, grammar))
        # The child outlives a client that disconnects, and counts until it has ended.
        compiling.add_done_callback(lambda _: self._children.release())
        return await asyncio.shield(compiling)

    def _compile(self, grammar: Grammar) -> str | None:
        ended = run_short_child(self._command, msgspec.json.encode(grammar))
        if ended.returncode == -signal.SIGALRM:
            return "it takes too long to compile: make it simpler"
        if ended.returncode in _CRASHES:
            return "it is nested too deeply, or its rules refer to each other in too long a chain"
        if ended.returncode:
            raise RuntimeError(f"checking a grammar failed: {ended.stderr.decode()[-2000:]}")
        return complaint_line(ended.stdout.decode()) or None
