"""The form of a model's batch."""

from dataclasses import dataclass, field

from mlx_dp.proto.messages.batching import Batching


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """The layout of a batch's rows in memory, and the shape of their mask.

    ``split``: rows lie in several slabs, for models that use the shared attention function.
    ``grouped_mask``: the mask is [rows, 1, 1, 1, visible], for models with their own attention
    over [rows, KV heads, queries per KV head, 1, visible].
    ``single``: rows run one by one in the model's own caches, as mlx-lm runs a single request.
    ``resumes``: the output does not depend on where prefill chunks end, so a prompt may continue
    from any cached prefix.
    ``pads``: chunks of several prompts can share a pass that is padded to the longest, for models
    whose states ignore the padding. Models without states need no padding.
    ``tails``: a step writes its tokens to a tail beside each slab, for devices on which a write to
    the slab copies it. Only a split form can have tails: slab and tail are two arrays.
    ``reason``: why a ``single`` form was chosen; empty for others.
    """

    split: bool
    grouped_mask: bool = False
    single: bool = False
    resumes: bool = True
    pads: bool = False
    tails: bool = False
    reason: str = field(default="", compare=False)

    @property
    def batching(self) -> Batching:
        if self.single:
            return Batching.ONE_BY_ONE
        if self.split:
            return Batching.SLABS_WITH_TAILS if self.tails else Batching.SEVERAL_SLABS
        return Batching.GROUPED_MASK if self.grouped_mask else Batching.ONE_SLAB

    def __str__(self) -> str:
        if self.single:
            return "one row at a time"
        where = "in several slabs" if self.split else "in one slab"
        if self.tails:
            return f"{where} with tails"
        return f"{where} with a grouped mask" if self.grouped_mask else where
