"""One request in a slot of the fake engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_dp.worker.fake.tokens import FakeAnswer


@dataclass(slots=True)
class FakeRow:
    """One slot. ``ids`` are prompt and answer, including drawn tokens that are under way.

    ``filled`` counts the prompt's tokens that are prefilled, ``content`` the tokens that were fed,
    and ``position`` is the answer position of the next token to draw.
    """

    answer: FakeAnswer
    ids: list[int]
    prompt_tokens: int
    position: int
    max_tokens: int
    filled: int = 0
    content: int = 0
    left: bool = False
    """Whether a later step was launched after the one that drew its last token."""

    @property
    def joined(self) -> bool:
        return self.filled == self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether its prompt is complete, and tokens are left to draw."""
        return self.joined and self.position < self.max_tokens

    @property
    def fed_ids(self) -> Sequence[int]:
        return self.ids[: self.content]
