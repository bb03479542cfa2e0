"""The engine's interface to the worker's loop, MLX or fake. No arrays pass through here."""

from dataclasses import dataclass
from typing import Protocol

from mlx_dp.kvcache.prefix.cached_prefix import CachedPrefix, PrefixStore, Save
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.protocol import TokenLogprob
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.peers import Peers


class UnsupportedModelError(Exception):
    """The engine cannot serve this model correctly; says why in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of a loaded engine. ``pool_tokens`` None: the model has no attention KV.

    ``prefix_cache``: the model's KV can be kept and continued from, and was asked to be.
    ``stateful``: a prefix can be continued only from a snapshot of state (recurrent layers,
    sliding windows). ``trims_to`` is how many tokens such a state may cover and still be cut back
    to fewer; 0: never. ``buffer_limit`` is how many buffers the device lets it hold; None: any.
    Each takes a multiple of ``page_nbytes``. ``batching`` is how requests that run at the same time
    share passes; None: there is no model. ``unbatched_reason`` says why they do not, if so.
    ``warm_up_s``: how long a warm-up may take, as the first step of each form is slower than later
    ones; 0: it is not.
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

    ``output_ids`` were emitted by an earlier owner: they are prefilled behind the prompt and
    count as answer. ``max_tokens`` bounds the whole answer, ``output_ids`` included.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may end an answer that matches its grammar; the engine itself stops at none."""

    @property
    def prefill_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Run the next ``num_tokens`` tokens of the slot that are not prefilled yet.

    ``prefix``, in a request's first chunk, is taken over before, and its tokens are not run.
    After the chunk the state is copied into ``snapshot``, and KV into the segments of ``saves``.
    A prompt's last token is run by the decode: it is in no chunk's KV, and no snapshot covers it.
    """

    slot: int
    num_tokens: int
    prefix: CachedPrefix | None = None
    snapshot: int | None = None
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks run in this order, and what one saves, a later one can begin with.

    No slot has two.
    """

    prefill: tuple[PrefillChunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token drawn for the request in ``slot``.

    With a ``fault``, the request cannot go on, and the token is of no account.
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
    """Runs a fixed set of slots. Calls come from one thread, and a slot has one request.

    Life of a slot: ``add``, prefill chunks until the whole prompt is in (the last one draws the
    first token), then one token a step, then ``keep`` and ``remove`` at any time.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def peers(self) -> Peers | None:
        """The other ranks of its group, which need it in their passes; None: it is alone."""

    def open(self, capacity: OwnerCapacity) -> None:
        """Take the resolved capacity. Called once, before anything is added."""

    def warm_up(self) -> None:
        """Load what only some requests need, so that none of them waits for it."""

    def reset(self) -> None:
        """Forget all that ran so far, and what was measured meanwhile. No slot is taken."""

    def fault(self, request: EngineRequest) -> str | None:
        """Say why this engine cannot run a request, as it cannot follow its grammar, or None."""

    def add(self, slot: int, request: EngineRequest) -> None:
        """Put a request into a free slot, without running anything."""

    def keep(self, slot: int, saves: tuple[Save, ...], snapshot: int | None) -> None:
        """Before ``remove``: copy a request's KV into segments, and its state into ``snapshot``.

        The state is the one after all tokens that launched steps have fed.
        """

    @property
    def held_nbytes(self) -> int:
        """Bytes that rows, segments and snapshots take, allocated room included.

        A prompt that is not in yet counts as nothing: ``row_nbytes`` was set aside for it.
        """

    @property
    def held_buffers(self) -> int:
        """Buffers that weights, rows, prompts under way, segments and snapshots are made of."""

    @property
    def row_buffers(self) -> int:
        """Buffers that one more request takes at most."""

    def growth_nbytes(self) -> int:
        """Bytes that the next step would add to them for the rows that decode."""

    def row_nbytes(self, num_tokens: int) -> int:
        """Bytes that a request takes at most until its prompt is in the batch.

        ``num_tokens`` are its prompt and the part of its answer that room is made for at first.
        The bytes include the caches of its chunks, beside its row.
        """

    def compact(self) -> None:
        """Give back room that no row uses. Copies, so it is for times of need."""

    def remove(self, slot: int) -> None:
        """Free a slot. Tokens of it that are still under way are dropped."""

    @property
    def busy(self) -> bool:
        """A call to ``step`` with an empty plan would launch or return something."""

    @property
    def launch_blocks(self) -> bool:
        """The last step was nearly done when its launch returned, as far as that was measured."""

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        """Launch one step, and return the tokens of the step launched before it.

        The launched step is the plan's chunks, and then one decode for every slot whose prompt is
        then in and whose budget is not spent; a chunk may be mixed into the decode. It is built on
        the lazy tokens of the step before, so the device has work while Python reads values. Hence
        one surplus token may be under way for a request that turns out to have finished:
        ``remove`` drops it. The order within a step is the order in which requests were added.
        """

    def memory(self) -> EngineMemory: ...

    def close(self) -> None:
        """Wait for the device to go idle and release it."""
