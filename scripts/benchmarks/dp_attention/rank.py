"""One rank of a group, or a single process, that steps on command.

Orders are lines of JSON on standard input, and each is answered by one line. Between orders the
rank only takes part in the passes of its peers.
"""

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, Final

from mlx_dp.proto.capacity.ownership import Limits
from mlx_dp.proto.messages.commands import Start
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.worker.contract.peers import Peers
from scripts.benchmarks.dp_attention.collectives import CollectiveClock
from scripts.benchmarks.engine.side import fill
from scripts.benchmarks.engine.worker import LocalWorker, OurBatch, start_message

MANY: Final = 2000
"""Response length that no measurement reaches."""


class RankProcess:
    """Executes one order at a time."""

    def __init__(self, worker: LocalWorker, clock: CollectiveClock) -> None:
        self._engine = worker.engine
        self._peers = worker.engine.peers
        self._batch = OurBatch(worker)
        self._clock = clock
        self._orders = b""
        self._begun_cpu_s = 0.0
        self._asleep_s = 0.0
        """Times of the peers' passes since the last ``begin``."""
        self._waited_s: float | None = None
        """Times in the steps since then; None: there were none."""

    def run(self) -> None:
        """Execute orders until standard input ends."""
        tell({"weights_nbytes": self._batch.worker.engine.facts.shape.weights_nbytes})
        while (line := self._next_order()) is not None:
            tell(self._handle(json.loads(line)))

    def _handle(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"do": "fill", "prompts": prompts}:
                fill(self._batch, prompts, MANY)
            case {"do": "begin", "trace": trace}:
                # No rank steps now, so that all ranks begin with the same pass.
                self._clock.begin(trace=trace)
                self._asleep_s, self._waited_s = 0.0, None
                self._begun_cpu_s = time.process_time()
            case {"do": "steps", "count": count}:
                return {"step_s": self._steps(count)}
            case {"do": "end"}:
                waited_s = self._asleep_s if self._waited_s is None else self._waited_s
                return {
                    "cpu_s": time.process_time() - self._begun_cpu_s,
                    "waited_s": waited_s,
                    "collectives_s": self._clock.end(),
                }
            case {"do": "clear"}:
                self._batch.clear()
            case _:
                raise ValueError(f"unknown order {order}")
        return {}

    def _steps(self, count: int) -> float:
        """Run some steps, and return the seconds of one."""
        began, waited_s = time.perf_counter(), self._in_passes_s()
        for _ in range(count):
            self._batch.step()
        self._batch.settle()
        self._waited_s = self._in_passes_s() - waited_s
        return (time.perf_counter() - began) / count

    def _in_passes_s(self) -> float:
        return 0.0 if self._peers is None else self._peers.totals.waited_s

    def _take_part(self, peers: Peers) -> None:
        """Compute one pass of the peers: in the loop, unless that would step as well."""
        if self._engine.busy:
            peers.take_part()
        else:
            self._batch.step()

    def _next_order(self) -> bytes | None:
        while b"\n" not in self._orders:
            if self._peers is not None and self._peers.poll_wanted():
                self._take_part(self._peers)
                continue
            news = [sys.stdin.fileno()]
            if self._peers is not None:
                news.append(self._peers.fd)
            began = time.perf_counter()
            readable = select.select(news, [], [])[0]
            self._asleep_s += time.perf_counter() - began
            if sys.stdin.fileno() in readable:
                read = os.read(sys.stdin.fileno(), 2**20)
                if not read:
                    return None
                self._orders += read
        line, self._orders = self._orders.split(b"\n", 1)
        return line


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def start_of(place: dict[str, Any]) -> Start:
    """The commands that a controller would send to this rank."""
    size = len(place["addresses"])
    group = None
    if size > 1:
        group = GroupPlace(
            backend=DistributedBackend.RING,
            rank=place["rank"],
            size=size,
            addresses=tuple(place["addresses"]),
            peers=tuple(place["peers"]),
            generation=1,
        )
    return start_message(
        Path(place["model"]),
        Limits(max_running_requests=64),
        chunk=512 // size,
        memory_nbytes=place["memory_nbytes"],
        prefix_cache=True,
        group=group,
    )


def main() -> None:
    clock = CollectiveClock()
    clock.install()
    RankProcess(LocalWorker(start_of(json.loads(sys.argv[1]))), clock).run()


if __name__ == "__main__":
    main()
