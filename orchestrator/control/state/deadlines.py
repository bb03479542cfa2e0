"""Deadlines of one length, so that they expire in the order in which they started."""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """One timer per key. Starting, stopping and finding the expired are O(1) each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s: Final = timeout_s
        self._expiry: Final[OrderedDict[Key, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expiry)

    def __contains__(self, key: Key) -> bool:
        return key in self._expiry

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def start(self, key: Key, now: float) -> None:
        """Start or restart the timer of a key."""
        self._expiry[key] = now + self._timeout_s
        self._expiry.move_to_end(key)

    def stop(self, key: Key) -> None:
        """Stop the timer of a key; unknown keys are no error."""
        self._expiry.pop(key, None)

    def expired(self, now: float) -> Key | None:
        """Return the first key whose time is up, or None. Its timer stays until it is stopped."""
        key = next(iter(self._expiry), None)
        return None if key is None or self._expiry[key] > now else key
