"""From the options to what each worker is told to load."""

from dataclasses import replace
from typing import Final

from mlx_dp.orchestrator.control.group_addresses import AddressBook, GroupAddresses
from mlx_dp.orchestrator.options import ServeOptions, WorkerOptions
from mlx_dp.proto.group import GroupPlace
from mlx_dp.proto.messages import Ready, Start
from mlx_dp.proto.ownership import OwnerSlice, divide_prefill
from mlx_dp.proto.parallel import ReplicaMode


class WorkerStarts:
    """One ``Start`` for each worker, in the order of their owners.

    A group is given new addresses for each of its epochs, so that nothing of an earlier one can
    reach it.
    """

    def __init__(self, options: ServeOptions, addresses: AddressBook | None) -> None:
        group = options.ownership.mode is ReplicaMode.DP_ATTENTION
        assert addresses is not None or not group, "a group needs addresses"
        self._options: Final = options.worker
        self._weights_nbytes: Final = options.weights_nbytes
        self._starts: Final = tuple(_start(options.worker, s) for s in options.ownership.slices)
        self._addresses: Final = addresses if group else None
        self._epoch: int | None = None
        self._meeting: GroupAddresses | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def surprise(self, index: int, ready: Ready) -> str | None:
        """What to say of a worker that holds something else than was planned."""
        if not self._weights_nbytes:
            return None
        planned, held = self._weights_nbytes[index], ready.shape.weights_nbytes
        if held == planned:
            return None
        return f"holds {held:,} bytes of weights, where {planned:,} were planned"

    def of(self, index: int, epoch: int) -> Start:
        """What this worker is told in this epoch. Raises OSError when there are no addresses."""
        start = self._starts[index]
        if self._addresses is None:
            return start
        if self._meeting is None or epoch != self._epoch:
            self._meeting = self._addresses.fresh(len(self), epoch)
            self._epoch = epoch
        place = GroupPlace(
            backend=self._options.distributed_backend,
            rank=start.share.parallel.tp_rank,
            size=len(self),
            addresses=self._meeting.addresses,
            peers=self._meeting.peers,
            generation=epoch,
            curve=self._meeting.curve,
            shard_vocabulary=self._options.shard_vocabulary,
        )
        chunk_tokens = divide_prefill(start.chunked_prefill_size, ranks=len(self))
        return replace(start, group=place, chunked_prefill_size=chunk_tokens)


def _start(worker: WorkerOptions, share: OwnerSlice) -> Start:
    return Start(
        engine=worker.engine,
        model_path="" if worker.model_path is None else str(worker.model_path),
        share=share,
        memory_nbytes=worker.memory_nbytes,
        context_length=worker.context_length,
        chunked_prefill_size=worker.chunked_prefill_size,
        prefix_cache=worker.prefix_cache,
        heartbeat_interval_s=worker.heartbeat_interval_s,
        fake=worker.fake,
        trust_remote_code=worker.trust_remote_code,
    )
