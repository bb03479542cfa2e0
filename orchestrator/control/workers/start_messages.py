"""Start messages: make the ``Start`` that tells a worker what to load."""

from dataclasses import replace
from typing import Final

from mlx_dp.orchestrator.options import ServeOptions, WorkerOptions
from mlx_dp.orchestrator.ports import AddressSource, GroupAddresses
from mlx_dp.proto.capacity.ownership import OwnerSlice
from mlx_dp.proto.capacity.parallel import ReplicaMode
from mlx_dp.proto.messages.commands import Start
from mlx_dp.proto.messages.events import Ready
from mlx_dp.proto.messages.group import GroupPlace


class StartMessages:
    """One ``Start`` for each worker, in the order of their owners.

    A group gets new addresses for each of its epochs, so that no process of an earlier one can
    reach it.
    """

    def __init__(self, options: ServeOptions, addresses: AddressSource | None) -> None:
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

    def unplanned_weights(self, index: int, ready: Ready) -> str | None:
        """Return a warning if a worker's weights differ in size from the plan, else None."""
        if not self._weights_nbytes:
            return None
        planned, held = self._weights_nbytes[index], ready.shape.weights_nbytes
        if held == planned:
            return None
        return f"holds {held:,} bytes of weights, but {planned:,} were planned"

    def start_for(self, index: int, epoch: int) -> Start:
        """The ``Start`` of a worker in this epoch. Raises OSError when there are no addresses."""
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
        return replace(start, group=place)


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
