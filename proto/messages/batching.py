"""The way in which a worker decodes concurrent requests."""

from enum import StrEnum


class Batching(StrEnum):
    """The form of a model's batch, chosen at load: the first that gives correct results."""

    SEVERAL_SLABS = "several_slabs"
    SLABS_WITH_TAILS = "several_slabs_with_tails"
    """As ``SEVERAL_SLABS``, for devices on which a step's writes would copy the slabs."""
    ONE_SLAB = "one_slab"
    GROUPED_MASK = "one_slab_grouped_mask"
    ONE_BY_ONE = "one_by_one"
    """No batch: each request runs in a forward pass of its own."""
