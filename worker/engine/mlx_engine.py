"""The engine for real models: continuous batching over fixed slots, with MLX."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.kvcache.prefix.segments import Segments
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.request_limits import next_tokens
from mlx_dp.proto.capacity.token_pool import pool_tokens
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.commands import Start
from mlx_dp.worker.contract.engine import (
    Drawn,
    EngineFacts,
    EngineMemory,
    EngineRequest,
    PrefillChunk,
    StepPlan,
)
from mlx_dp.worker.contract.peers import Peers
from mlx_dp.worker.engine.decode_batch import DecodeBatch, LaunchedStep
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill
from mlx_dp.worker.engine.prefill_step import PrefillStep
from mlx_dp.worker.grammar.compiler import GrammarCompiler
from mlx_dp.worker.grammar.masks import GrammarMasks
from mlx_dp.worker.loading import device
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel
from mlx_dp.worker.lockstep.rank_model import StartWatch, load_model

_SPARE_SHARE: Final = 0.75
"""The share of the budget up to which slabs may allocate memory before a row needs it."""


@dataclass(slots=True)
class _Occupant:
    """The request in a slot. ``key`` is unique, also among requests of the same slot."""

    key: int
    request: EngineRequest
    prefill: Prefill | None
    room: int


class MlxEngine:
    """Prefills prompts in the model's own caches and decodes in a batch. See ``Engine``."""

    def __init__(
        self,
        loaded: LoadedModel,
        facts: EngineFacts,
        form: BatchForm,
        grammars: GrammarCompiler,
        peers: Peers | None = None,
        *,
        memory_nbytes: int | None = None,
    ) -> None:
        self._peers = peers
        self._memory_nbytes = memory_nbytes
        self._loaded = loaded
        self._facts = facts
        self._keys: Iterator[int] = count()
        self._slots: dict[int, _Occupant] = {}
        self._slot_of: dict[int, int] = {}
        self._capacity: OwnerCapacity | None = None
        self._form = form
        self._weight_buffers = len(tree_flatten(loaded.model.parameters()))
        self._grammars = grammars
        self._masks = GrammarMasks(grammars)
        self._begin()

    def _begin(self) -> None:
        """Start without requests, prefixes and measurements."""
        self._segments = Segments(self._facts.page_nbytes)
        self._caches = DecodeCaches(self._loaded, self._form)
        self._batch = DecodeBatch(
            self._caches,
            self._segments,
            self._masks,
            vocab_size=self._facts.shape.vocab_size,
        )
        self._launched: LaunchedStep | None = None
        self._launch_blocks = device.launch_blocks()

    @classmethod
    def load(cls, start: Start, watch: StartWatch | None = None) -> "MlxEngine":
        """Load the model that ``Start`` names, within the memory that it grants.

        Raises the errors of ``rank_model.load_model``.
        """
        device.limit_memory(start.memory_nbytes)
        loaded, peers = load_model(start, watch)
        shape = loaded.shape
        device.wire_weights(shape.weights_nbytes)
        tokens = pool_tokens(
            start.memory_nbytes, shape, start.share, prefix_cache=start.prefix_cache
        )
        form = choose_form(loaded)
        facts = EngineFacts(
            shape=shape,
            pool_tokens=tokens,
            device=device.describe(),
            prefix_cache=start.prefix_cache and form.resumes,
            stateful=loaded.layout.stateful,
            trims_to=loaded.layout.trims_to,
            buffer_limit=device.buffer_limit(),
            page_nbytes=device.page_nbytes(),
            batching=form.batching,
            unbatched_reason=clip_text(form.reason),
            warm_up_s=device.warm_up_s(),
        )
        grammars = GrammarCompiler(
            Path(start.model_path),
            shape.vocab_size,
            trust_remote_code=start.trust_remote_code,
        )
        return cls(loaded, facts, form, grammars, peers, memory_nbytes=start.memory_nbytes)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def peers(self) -> Peers | None:
        return self._peers

    def open(self, capacity: OwnerCapacity) -> None:
        assert self._capacity is None, "opened twice"
        self._capacity = capacity
        device.limit_free_buffers(self._memory_nbytes, capacity.cache_nbytes)

    def warm_up(self) -> None:
        # At the first grammar, running streams would wait for it.
        self._grammars.warm_up()

    def reset(self) -> None:
        assert not self._slots, self._slots
        assert self._launched is None, "a step is under way"
        self._begin()
        mx.clear_cache()

    def fault(self, request: EngineRequest) -> str | None:
        if request.grammar is None:
            return None
        return self._grammars.fault(request.grammar, request.stop_token_ids)

    def add(self, slot: int, request: EngineRequest) -> None:
        assert self._capacity is not None, "open() comes first"
        assert 0 <= slot < self._capacity.request_slots, (slot, self._capacity.request_slots)
        assert slot not in self._slots, f"slot {slot} is taken"
        ids = request.prompt_ids + request.output_ids
        left = request.max_tokens - len(request.output_ids)
        assert left >= 1, f"slot {slot}: nothing is left to draw"
        room = next_tokens(len(ids), left)
        key = next(self._keys)
        self._slots[slot] = _Occupant(key, request, Prefill(self._loaded, ids), room)
        self._slot_of[key] = slot

    def save_prefix(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        occupant = self._slots[slot]
        if occupant.prefill is not None:
            PrefillStep.save(occupant.prefill, saves, snapshot, self._segments)
            return
        found = self._batch.save_prefix(occupant.key, saves, snapshot)
        assert found, f"slot {slot} has left the batch"

    def split(self, segment: int, at: int, head: int) -> None:
        # A row that has left may not have been copied into this segment yet.
        self._batch.drop_saved()
        self._segments.split(segment, at, head)

    def drop(self, segments: Collection[int], snapshots: Collection[int]) -> None:
        self._batch.drop_saved()
        self._segments.drop(segments, snapshots)

    @property
    def held_nbytes(self) -> int:
        return self._caches.nbytes + self._segments.nbytes

    @property
    def held_buffers(self) -> int:
        prompts = sum(one.prefill is not None for one in self._slots.values()) * self.row_buffers
        rows = self._caches.num_buffers
        return self._weight_buffers + rows + prompts + self._segments.num_buffers

    @property
    def row_buffers(self) -> int:
        return 2 * len(self._loaded.layout.leaves)

    def growth_nbytes(self) -> int:
        return self._caches.growth_nbytes()

    def row_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of the prompt's own caches and of the row that they are copied into."""
        prompt = self._facts.shape.request_nbytes(num_tokens)
        return prompt + self._caches.row_nbytes(num_tokens)

    def compact(self) -> None:
        self._batch.drop_saved()
        self._caches.compact()

    def remove(self, slot: int) -> None:
        occupant = self._slots.pop(slot)
        del self._slot_of[occupant.key]
        self._batch.leave(occupant.key)

    @property
    def busy(self) -> bool:
        return self._launched is not None or len(self._batch) > 0

    @property
    def launch_blocks(self) -> bool:
        return self._launch_blocks

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        began_at = time.perf_counter()
        before = self._launched
        self._batch.drop_done()
        self._set_spare()
        prefill = PrefillStep(self._caches, self._segments, decoding=len(self._batch) > 0)
        for chunk in plan.prefill:
            self._prefill(prefill, chunk)
        chunks = prefill.finish()
        self._launched = None
        if len(self._batch):
            self._batch.launch_forward(chunks)
            self._launched = self._batch.launch_sampling()
        if before is None:
            if prefill.fence is not None:
                # There is nothing to read, but the device must not lag by more than one step.
                mx.eval(prefill.fence)
            return ()
        # Wait for the step before only now: the device already has the next one.
        launched_at = time.perf_counter()
        drawn = sorted(before.read(), key=lambda row: row[0])
        # If the launch took longer than the wait, the launch blocked: the device accepts a limited
        # number of command buffers, and their number in a step depends on model and plan.
        if not self._batch.launch_reads:
            self._launch_blocks = launched_at - began_at > time.perf_counter() - launched_at
        return tuple(
            Drawn(
                slot=self._slot_of[key],
                token=token,
                logprob=logprob,
                fault=before.faults.get(key),
            )
            for key, token, logprob in drawn
            if key in self._slot_of
        )

    def memory(self) -> EngineMemory:
        prefilling = sum(o.prefill.done for o in self._slots.values() if o.prefill is not None)
        held = device.memory()
        return EngineMemory(
            used_tokens=self._caches.used_tokens + prefilling,
            device_nbytes=held.active_nbytes + held.cached_nbytes,
        )

    def close(self) -> None:
        mx.synchronize()
        if self._peers is not None:
            self._peers.close()

    def _prefill(self, step: PrefillStep, chunk: PrefillChunk) -> None:
        occupant = self._slots[chunk.slot]
        assert occupant.prefill is not None, f"slot {chunk.slot} has its prompt already"
        rooms = [one.room for one in self._slots.values() if one.prefill is not None]
        share = occupant.prefill.share(chunk.num_tokens)
        self._caches.prepare(occupant.room, share, set_aside=sum(map(self.row_nbytes, rooms)))
        step.run(occupant.prefill, chunk, lambda: self._join(occupant))

    def _set_spare(self) -> None:
        assert self._capacity is not None, "open() comes first"
        limit = self._capacity.cache_nbytes
        if limit is None:
            self._caches.set_spare(None)
            return
        prefills = (o.prefill for o in self._slots.values() if o.prefill is not None)
        filled = sum(prefill.nbytes for prefill in prefills)
        self._caches.set_spare(int(_SPARE_SHARE * limit) - self.held_nbytes - filled)

    def _join(self, occupant: _Occupant) -> None:
        assert occupant.prefill is not None, f"request {occupant.key} has joined already"
        self._batch.join(occupant.key, occupant.request, occupant.prefill, room=occupant.room)
        occupant.prefill = None
