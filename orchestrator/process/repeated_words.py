"""Says a thing once, and then rarely, while it stays so."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RepeatedWords:
    """Remembers when each sentence was said last."""

    every_s: float
    _said_at: dict[str, float] = field(default_factory=dict)

    def worth_saying(self, sentence: str, now: float) -> bool:
        """Whether it is new, or long ago; then it counts as said."""
        said_at = self._said_at.get(sentence)
        if said_at is not None and now - said_at < self.every_s:
            return False
        self._said_at[sentence] = now
        return True

    def forget(self) -> None:
        """Things have changed: what is said from now on is news."""
        self._said_at.clear()
