"""Loads this worker's model: the whole model, or in a group this rank's share."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx

from mlx_dp.proto.messages.commands import Start
from mlx_dp.proto.messages.events import WorkerPhase
from mlx_dp.proto.messages.group import GroupPlace
from mlx_dp.worker.contract.failure import is_model_fault
from mlx_dp.worker.contract.peers import PassWatch
from mlx_dp.worker.loading.loaded_model import LoadedModel, load, read
from mlx_dp.worker.lockstep.announcement import FINGERPRINT_BYTES
from mlx_dp.worker.lockstep.group import join
from mlx_dp.worker.lockstep.lockstep import Lockstep
from mlx_dp.worker.lockstep.rank_exchange import RankExchange
from mlx_dp.worker.shards.sharded_load import ShardedModel, shard_model

PATIENCE_S: Final = 1_800.0
"""The wait for a peer, which may load from a slow disk. The controller gives up long before."""


class StartWatch(PassWatch, Protocol):
    """Also receives the phases of a start."""

    def enter(self, phase: WorkerPhase) -> None: ...


def load_model(start: Start, watch: StartWatch | None) -> tuple[LoadedModel, Lockstep | None]:
    """Load the model that ``Start`` names; in a group, also return the lockstep to run it in.

    Raises ConfigError, UnsupportedModelError, and RankLostError in a group.
    """
    if start.group is None:
        if watch is not None:
            watch.enter(WorkerPhase.LOADING)
        return load(Path(start.model_path), trust_remote_code=start.trust_remote_code), None
    assert watch is not None, "a group needs a watch while it forms"
    watch.enter(WorkerPhase.FORMING)
    lockstep = Lockstep(join(start.group), watch)
    watch.enter(WorkerPhase.LOADING)
    whole = read(Path(start.model_path), trust_remote_code=start.trust_remote_code)
    return _load_share(whole, start.group, lockstep), lockstep


def _load_share(whole: LoadedModel, place: GroupPlace, lockstep: Lockstep) -> LoadedModel:
    """Load this rank's weights. The caches were inspected with the whole model, still lazy."""
    sharded = shard_model(
        whole.model,
        rank=place.rank,
        size=place.size,
        runner=lockstep,
        vocabulary=place.shard_vocabulary,
    )
    mx.eval(whole.model.parameters())
    fingerprint = _fingerprint(whole, sharded)
    lockstep.bind(sharded, RankExchange(place, fingerprint, deadline_s=PATIENCE_S))
    return replace(
        whole,
        model=LockstepModel(whole.model, lockstep),
        shape=replace(whole.shape, weights_nbytes=sharded.kept_nbytes),
    )


def _fingerprint(whole: LoadedModel, sharded: ShardedModel) -> bytes:
    """Return a hash that is equal on ranks with the same model, divided in the same way."""
    blocks = [(r.name, r.width, str(r.dtype), r.output_width) for r in sharded.records]
    told = repr((whole.shape, blocks, sharded.calls))
    return hashlib.blake2b(told.encode(), digest_size=FINGERPRINT_BYTES).digest()


class LockstepModel:
    """Replaces the model in the engine. Calls run in lockstep; attributes are the model's."""

    def __init__(self, model: Any, lockstep: Lockstep) -> None:
        self._model = model
        self._lockstep = lockstep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        """Run the model as a pass; returns when all its collectives are launched.

        Only logits of single tokens are read, never those of a chunk: if the head is divided, a
        chunk has none.
        """
        self._lockstep.begin(tokens.size, tokens.size if tokens.shape[-1] == 1 else 0)
        try:
            logits: mx.array = self._model(tokens, cache=cache)
        except Exception as error:
            # The peers wait for the rest of the pass. After any other error nothing can be
            # launched.
            if is_model_fault(error):
                self._lockstep.abandon()
            raise
        self._lockstep.end()
        return logits
