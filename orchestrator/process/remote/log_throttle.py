"""Limits how often the same sentence is logged."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class LogThrottle:
    """Lets each sentence through once per ``every_s``."""

    every_s: float
    _said_at: dict[str, float] = field(default_factory=dict)

    def admit(self, sentence: str, now: float) -> bool:
        """Return whether to log the sentence now; if so, start its interval."""
        said_at = self._said_at.get(sentence)
        if said_at is not None and now - said_at < self.every_s:
            return False
        self._said_at[sentence] = now
        return True

    def reset(self) -> None:
        """Let every sentence through again, since the situation has changed."""
        self._said_at.clear()
