"""The properties of a model that matter to the prefix cache."""

from dataclasses import dataclass

from mlx_dp.proto.capacity.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFacts:
    """``stateful``: a prefix can be continued only from a snapshot of state.

    ``trims_to`` is the longest state, in tokens, that can be cut back to fewer; 0: none can.
    ``shape`` has the sizes in bytes. The device allocates multiples of ``page_nbytes``.
    """

    shape: ModelShape
    stateful: bool = False
    trims_to: int = 0
    page_nbytes: int = 1

    def segment_nbytes(self, num_tokens: int) -> int:
        return num_tokens * self.shape.kv_bytes_per_token

    def snapshot_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of the state after ``num_tokens`` tokens."""
        kept = self.shape.request_nbytes(num_tokens) - self.segment_nbytes(num_tokens)
        return kept + self.slack_nbytes if kept else 0

    @property
    def slack_nbytes(self) -> int:
        """The most bytes that a segment or a snapshot wastes in partly filled pages: its arrays
        have about two shapes.
        """
        return 2 * (self.page_nbytes - 1)
