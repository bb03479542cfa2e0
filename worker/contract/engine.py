"""The engine's interface to the worker's loop, MLX or fake. No arrays pass through here."""

from dataclasses import dataclass
from typing import Protocol

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, PrefixStore, Save
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.events import TokenLogprob
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.peers import Peers


class UnsupportedModelError(Exception):
    """The engine cannot serve this model correctly. The message is one sentence with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of a loaded engine. ``pool_tokens`` None: the model has no attention KV.

    ``prefix_cache``: the prefix cache is on, and the model's KV can be continued from.
    ``stateful``: a prefix can be continued only from a snapshot of state (recurrent layers, sliding
    windows). ``trims_to`` is the longest state, in tokens, that can be cut back to fewer; 0: none
    can. ``buffer_limit`` is the number of buffers that the device allows; None: any. Each takes a
    multiple of ``page_nbytes``. ``batching`` is the form in which concurrent requests share passes;
    None: there is no model. ``unbatched_reason`` says why they do not share, if so. ``warm_up_s``
    is the longest warm-up, for devices on which the first step of each form is slow; 0: no warm-up.
    """

    shape: ModelShape
    pool_tokens: int | None
    device: str
    prefix_cache: bool = False
    stateful: bool = False
    trims_to: int = 0
    buffer_limit: int | None = None
    page_nbytes: int = 1
    batching: Batching | None = None
    unbatched_reason: str = ""
    warm_up_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine sees it.

    ``output_ids`` were emitted by an earlier owner: they are prefilled after the prompt and count
    as answer. ``max_tokens`` bounds the whole answer, ``output_ids`` included.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may end an answer that matches its grammar. The engine itself does not stop."""

    @property
    def prefill_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Run the next ``num_tokens`` tokens of the slot that are not prefilled yet.

    ``prefix``, in a request's first chunk, is copied in before the chunk, and its tokens are not
    run. After the chunk the state is copied into ``snapshot``, and KV into the segments of
    ``saves``. The decode runs a prompt's last token: no chunk's KV and no snapshot includes it.
    """

    slot: int
    num_tokens: int
    prefix: CachedPrefix | None = None
    snapshot: int | None = None
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks run in this order; a later chunk can start from a prefix that an earlier one saves.

    Each slot has at most one chunk.
    """

    prefill: tuple[PrefillChunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token drawn for the request in ``slot``.

    With a ``fault``, the request cannot continue; ignore the token.
    """

    slot: int
    token: int
    logprob: TokenLogprob | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """``used_tokens`` of KV hold content; ``device_nbytes`` is what the device has allocated.

    ``used_tokens`` are those of running requests.
    """

    used_tokens: int
    device_nbytes: int


class Engine(PrefixStore, Protocol):
    """Runs a fixed set of slots, one request each. Calls come from one thread.

    Life of a slot: ``add``; prefill chunks until the prompt is complete (the last one draws the
    first token); one token per step; ``save_prefix`` and ``remove`` at any time.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def peers(self) -> Peers | None:
        """The other ranks of this rank's group, whose passes need it; None: there is no group."""

    def open(self, capacity: OwnerCapacity) -> None:
        """Set the resolved capacity. Called once, before the first ``add``."""

    def warm_up(self) -> None:
        """Load resources that only some requests need, so that no request waits for them."""

    def reset(self) -> None:
        """Discard all state and measurements of earlier steps. All slots must be free."""

    def fault(self, request: EngineRequest) -> str | None:
        """Return why this engine cannot run a request (its grammar, for example), or None."""

    def add(self, slot: int, request: EngineRequest) -> None:
        """Put a request into a free slot. Runs nothing."""

    def save_prefix(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        """Copy a request's KV into segments, and its state into ``snapshot``, before ``remove``.

        The state is the one after all tokens that launched steps have fed.
        """

    @property
    def held_nbytes(self) -> int:
        """Bytes of rows, segments and snapshots, unused allocated memory included.

        An incomplete prompt does not count: the scheduler has set ``row_nbytes`` aside for it.
        """

    @property
    def held_buffers(self) -> int:
        """Buffers of weights, rows, incomplete prompts, segments and snapshots."""

    @property
    def row_buffers(self) -> int:
        """The most buffers that one more request takes."""

    def growth_nbytes(self) -> int:
        """Return the bytes that the next step would allocate for the rows that decode."""

    def row_nbytes(self, num_tokens: int) -> int:
        """Return the most bytes that a request takes until its prompt is in the batch.

        ``num_tokens`` are its prompt and the first part of its answer. The bytes include the caches
        of its chunks and its row.
        """

    def compact(self) -> None:
        """Free memory that no row uses. It copies rows, so call it only when memory is short."""

    def remove(self, slot: int) -> None:
        """Free a slot. Its tokens that are still under way are dropped."""

    @property
    def busy(self) -> bool:
        """Whether a ``step`` with an empty plan would launch or return something."""

    @property
    def launch_blocks(self) -> bool:
        """Whether the launch of the last step returned only when the step was nearly done.

        An estimate from measured times.
        """

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        """Launch one step, and return the tokens of the step launched before it.

        The launched step runs the plan's chunks, and then one decode for every slot whose prompt is
        complete and whose ``max_tokens`` is not reached; a chunk may be mixed into the decode. The
        step is built on the lazy tokens of the step before, so the device has work while Python
        reads values. So one surplus token may be under way for a request that turns out to have
        finished: ``remove`` drops it. The order within a step is the order of ``add``.
        """

    def memory(self) -> EngineMemory: ...

    def close(self) -> None:
        """Wait for the device to go idle and release it."""
