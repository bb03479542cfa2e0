"""Several ranks, each a process, that serve one model after another in one group."""

import os
import queue
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from tests.support.conformance.rank_report import RankJob, RankReport

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240.0
"""The time limit of one model: ranks that wait for each other wait for ever."""


class Ranks:
    """Processes that run until ``close``. Once ``failed``, they cannot be used again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed = False
        self._stack = ExitStack()
        self._generation = 0
        self._processes: list[subprocess.Popen[str]] = []
        self._said: list[queue.Queue[str]] = []
        self._scratch = Path(self._stack.enter_context(TemporaryDirectory()))
        self._addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(self.size))
        for rank in range(size):
            log = self._stack.enter_context((self._scratch / f"rank{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.conformance.rank_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            self._stack.enter_context(process)
            self._stack.callback(process.kill)
            self._processes.append(process)
            self._said.append(_lines_of(process))

    def close(self) -> None:
        self._stack.close()

    def serve(
        self,
        directory: Path,
        *,
        scenario: str,
        chunk: int,
        vocabulary: bool = False,
        warm_up: bool = True,
    ) -> list[RankReport]:
        """Let all ranks serve the model until all requests have ended."""
        self.failed = True
        self._generation += 1
        peers = tuple(
            f"ipc://{self._scratch}/{self._generation}-{rank}" for rank in range(self.size)
        )
        for rank in range(self.size):
            place = GroupPlace(
                backend=DistributedBackend.RING,
                rank=rank,
                size=self.size,
                addresses=self._addresses,
                peers=peers,
                generation=self._generation,
                shard_vocabulary=vocabulary,
            )
            job = RankJob(
                directory=directory,
                place=asdict(place),
                scenario=scenario,
                chunk=chunk,
                warm_up=warm_up,
            )
            self._tell(rank, job.encode())
        for rank in range(self.size):
            line = self._hear(rank)
            assert line == "done", line
        for rank in range(self.size):
            self._tell(rank, "stop")
        reports = [RankReport.decode(self._hear(rank)) for rank in range(self.size)]
        self.failed = False
        return reports

    def _tell(self, rank: int, line: str) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        print(line, file=pipe, flush=True)

    def _hear(self, rank: int) -> str:
        try:
            line = self._said[rank].get(timeout=DEADLINE_S)
        except queue.Empty:
            line = ""
        if not line:
            logs = "\n".join(
                f"rank {r} ({p.poll()}): {(self._scratch / f'rank{r}.log').read_text()[-3000:]}"
                for r, p in enumerate(self._processes)
            )
            raise AssertionError(f"rank {rank} printed nothing\n{logs}")
        return line


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _lines_of(process: "subprocess.Popen[str]") -> "queue.Queue[str]":
    """A line that the process printed; an empty one when it has ended."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.strip())
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines
