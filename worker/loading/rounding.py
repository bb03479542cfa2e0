"""What may differ between two ways to compute the same logits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import mlx.core as mx

TRIALS: Final = 3
"""Prompts that a comparison is made with, where the first one does not settle it."""
MARGIN: Final = 3.0
"""A batch rounds as often as the measured noise did, but not in the same places."""
SHARE_OF_NEAREST: Final = 0.25
"""Of the distance between two rows: what comes nearer to another row is no rounding."""


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
"""With TF32 a product keeps 10 bits of each factor's mantissa: 5e-4 of it."""
HALF_TOLERANCE: Final = Tolerance(least=6e-2, most=0.15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One prompt set computed in two ways: the difference at each row and step."""

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
    """The largest difference, and what rounding explains of it."""

    worst: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.worst <= self.allowed


def compare(trial: Callable[[int], Trial], noise: Callable[[int], float]) -> Comparison:
    """Compare with one prompt set, and with several and this device's noise where that fails.

    Rounding that tips a router's tie shows at a few places, others for each prompt set; a fault
    shows at the same places for all. So each place counts with the median of its trials.
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
    """The largest difference at each row and step, relative to the largest logit of all.

    Infinite where it is not a number.
    """
    whole = mx.stack(list(expected[: len(found)])).astype(mx.float32)
    other = mx.stack(list(found)).astype(mx.float32)
    places = mx.max(mx.abs(whole - other), axis=-1) / mx.maximum(mx.max(mx.abs(whole)), 1e-6)
    values: list[float] = places.flatten().tolist()  # type: ignore[assignment]
    return [value if math.isfinite(value) else math.inf for value in values]


def difference(expected: Sequence[mx.array], found: Sequence[mx.array]) -> float:
    """Largest difference relative to the largest logit; infinite when it is not a number."""
    return max(differences(expected, found))


def tolerance(logits: Sequence[mx.array]) -> Tolerance:
    """What rounding may make of these."""
    return FLOAT32_TOLERANCE if logits[0].dtype == mx.float32 else HALF_TOLERANCE
