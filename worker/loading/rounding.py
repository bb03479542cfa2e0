"""The tolerated differences between two ways to compute the same logits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import mlx.core as mx

TRIALS: Final = 3
"""Prompt sets of a comparison, if the first one is not conclusive."""
MARGIN: Final = 3.0
"""A batch rounds as often as in the measured noise, but in other places."""
SHARE_OF_NEAREST: Final = 0.25
"""A share of the distance between two rows: a larger difference is not rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest difference, relative to the largest number, that rounding may cause.

    ``least`` holds on every device, ``most`` bounds what measured noise can raise it to.
    """

    least: float
    most: float

    def with_noise(self, noise: float, *, nearest: float = math.inf) -> float:
        """``nearest`` is the distance between the two most similar rows."""
        most = min(self.most, SHARE_OF_NEAREST * nearest)
        return max(self.least, min(MARGIN * noise, most))


FLOAT32_TOLERANCE: Final = Tolerance(least=1e-3, most=1e-2)
"""With TF32 a product keeps 10 bits of each factor's mantissa: a relative error of 5e-4."""
HALF_TOLERANCE: Final = Tolerance(least=6e-2, most=0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The differences of one prompt set computed in several ways, by row and step."""

    places: tuple[float, ...]
    tolerance: Tolerance
    nearest: float

    @classmethod
    def of(cls, expected: Sequence[mx.array], *runs: Sequence[mx.array]) -> "Trial":
        """``runs``: the same rows, computed in other ways; some lack the last ones."""
        neighbours = [*expected[1:], expected[0]]
        return cls(
            places=tuple(place for found in runs for place in differences(expected, found)),
            tolerance=tolerance(expected),
            nearest=min(differences(expected, neighbours)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The largest difference, and the largest one that rounding explains."""

    worst: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.worst <= self.allowed


def compare(trial: Callable[[int], Trial], noise: Callable[[int], float]) -> Comparison:
    """Compare with one prompt set; if that fails, with several, and with this device's noise.

    Rounding that changes a router's choice shows at a few places, different ones for each prompt
    set. A fault shows at the same places for all. So each place counts with its median.
    """
    first = trial(0)
    least = first.tolerance.least
    if max(first.places) <= least:
        return Comparison(worst=max(first.places), allowed=least)
    trials = [first, *(trial(number) for number in range(1, TRIALS))]
    worst = max_of_medians([one.places for one in trials])
    if worst <= least:
        return Comparison(worst=worst, allowed=least)
    measured = max(noise(number) for number in range(TRIALS))
    nearest = min(one.nearest for one in trials)
    return Comparison(worst=worst, allowed=first.tolerance.with_noise(measured, nearest=nearest))


def max_of_medians(trials: Sequence[Sequence[float]]) -> float:
    worst: float = max(median(places) for places in zip(*trials, strict=True))
    return worst


def differences(expected: Sequence[mx.array], found: Sequence[mx.array]) -> list[float]:
    """Return the largest difference at each row and step, relative to the largest logit of all.

    It is infinite where a value is not a number.
    """
    whole = mx.stack(list(expected[: len(found)])).astype(mx.float32)
    other = mx.stack(list(found)).astype(mx.float32)
    places = mx.max(mx.abs(whole - other), axis=-1) / mx.maximum(mx.max(mx.abs(whole)), 1e-6)
    values: list[float] = places.flatten().tolist()  # type: ignore[assignment]
    return [value if math.isfinite(value) else math.inf for value in values]


def difference(expected: Sequence[mx.array], found: Sequence[mx.array]) -> float:
    """Return the largest difference relative to the largest logit; infinite for NaN."""
    return max(differences(expected, found))


def tolerance(logits: Sequence[mx.array]) -> Tolerance:
    """Return the tolerance for logits of this type."""
    return FLOAT32_TOLERANCE if logits[0].dtype == mx.float32 else HALF_TOLERANCE
