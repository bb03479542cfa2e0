"""Token ids as JSON."""

from collections.abc import Sequence

import msgspec


class EncodedIds:
    """Token ids as items of a JSON array, which takes a fifth of a list's memory."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, ids: Sequence[int]) -> None:
        """Append further ids."""
        if not ids:
            return
        if self._items:
            self._items += b","
        self._items += msgspec.json.encode(ids)[1:-1]

    @property
    def array(self) -> bytes:
        return b"[" + self._items + b"]"
