"""One decode step on one slab."""

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class WritePlace:
    """The write positions of a step in layers of one window, and the tokens visible afterwards.

    If all rows write at the same place, that is ``position``, and no mask is needed. Otherwise
    ``positions`` has one per row, and ``mask`` [rows, 1, 1, visible] is true for the tokens that a
    row may see.
    """

    visible: int
    position: int | None = None
    positions: mx.array | None = None
    mask: mx.array | None = None


@dataclass(frozen=True, slots=True)
class FoldedPlace:
    """The part of a slab that rows with a tail see; ``mask`` [rows, 1, 1, visible], None: all."""

    visible: int
    mask: mx.array | None


@dataclass(slots=True)
class SlabStep:
    """Batch rows ``start`` to ``end`` are the slab's; they had ``lengths`` tokens before.

    The newest ``in_tail`` tokens of each row are in the slab's tail.
    """

    start: int
    lengths: tuple[int, ...]
    in_tail: int = 0
    _places: dict[int | None, WritePlace] = field(default_factory=dict)
    _indices: mx.array | None = None
    _folded: FoldedPlace | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.lengths)

    @property
    def indices(self) -> mx.array:
        """The row indices, to write to each row at its own position."""
        if self._indices is None:
            self._indices = mx.arange(len(self.lengths), dtype=mx.int32)
        return self._indices

    def place(self, window: int | None) -> WritePlace:
        """Return the same object for all layers of one window, so that its arrays are made once."""
        place = self._places.get(window)
        if place is None:
            place = self._places[window] = self._placed(window)
        return place

    @property
    def folded(self) -> FoldedPlace:
        """The same object for all layers that keep every token, where the slab has a tail."""
        if self._folded is None:
            lengths = [length - self.in_tail for length in self.lengths]
            visible, mask = max(lengths), None
            if min(lengths) < visible:
                index = mx.arange(visible, dtype=mx.int32)
                mask = (index < mx.array(lengths, dtype=mx.int32)[:, None])[:, None, None]
            self._folded = FoldedPlace(visible, mask)
        return self._folded

    def recent(self, window: int | None, num_tokens: int) -> mx.array | None:
        """Return the mask [rows, 1, 1, visible] of the last ``num_tokens`` tokens; None: all."""
        visible = self.place(window).visible
        if visible <= num_tokens:
            return self.place(window).mask
        index = mx.arange(visible, dtype=mx.int32)
        newest = mx.array(self.lengths, dtype=mx.int32)[:, None]
        behind = newest - index if window is None else (newest - index) % window
        seen = (behind >= 0) & (behind < num_tokens) & (behind <= newest)
        return seen[:, None, None]

    def _placed(self, window: int | None) -> WritePlace:
        longest = max(self.lengths)
        visible = longest + 1 if window is None else min(longest + 1, window)
        places = self.lengths if window is None else tuple(n % window for n in self.lengths)
        shortest = min(self.lengths)
        if min(places) == max(places) and (shortest == longest or shortest + 1 >= visible):
            return WritePlace(visible, position=places[0])
        positions = mx.array(places, dtype=mx.int32)
        if shortest + 1 >= visible:
            return WritePlace(visible, positions=positions)
        newest = positions if window is None else mx.array(self.lengths, dtype=mx.int32)
        mask = mx.arange(visible, dtype=mx.int32) <= newest[:, None]
        return WritePlace(visible, positions=positions, mask=mask[:, None, None])
