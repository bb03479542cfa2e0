"""Reading what a worker prints, without waiting for it."""

import asyncio
import os
from itertools import pairwise

from mlx_dp.orchestrator.process.worker_output import WorkerOutput


def test_what_is_left_in_the_pipe_is_read_at_the_end() -> None:
    async def scenario() -> list[str]:
        lines: list[str] = []
        reading, writing = os.pipe()
        output = WorkerOutput(reading, lines.append)
        os.write(writing, b"one\ntwo")
        os.close(writing)
        # No turn of the loop in between: the exit was seen first.
        output.finish()
        output.finish()
        return lines

    assert asyncio.run(scenario()) == ["one", "two"]


def test_a_pipe_that_someone_else_holds_open_is_not_waited_for() -> None:
    async def scenario() -> list[str]:
        lines: list[str] = []
        reading, writing = os.pipe()
        output = WorkerOutput(reading, lines.append)
        os.write(writing, b"last words\n")
        output.finish()
        os.close(writing)
        return lines

    assert asyncio.run(scenario()) == ["last words"]


def test_broken_text_is_shown_not_raised() -> None:
    async def scenario() -> list[str]:
        lines: list[str] = []
        reading, writing = os.pipe()
        output = WorkerOutput(reading, lines.append)
        os.write(writing, b"\xff[bold]\r\n")
        os.close(writing)
        output.finish()
        return lines

    assert asyncio.run(scenario()) == ["\ufffd[bold]"]


def test_a_flood_of_lines_leaves_the_loop_its_turns() -> None:
    async def scenario() -> list[int]:
        lines: list[str] = []
        reading, writing = os.pipe()
        output = WorkerOutput(reading, lines.append)
        os.write(writing, b"x\n" * 30_000)
        seen = []
        async with asyncio.timeout(60.0):
            while len(lines) < 30_000:
                await asyncio.sleep(0)
                seen.append(len(lines))
        os.write(writing, b"later\n")
        async with asyncio.timeout(60.0):
            while lines[-1] != "later":
                await asyncio.sleep(0)
        os.close(writing)
        output.finish()
        assert len(lines) == 30_001
        return seen

    seen = asyncio.run(scenario())
    assert max(after - before for before, after in pairwise(seen)) <= 64
