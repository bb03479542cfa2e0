"""Invariants of the control plane, checked at the end of each of its tests."""

from collections.abc import Iterator

import pytest

from tests.support.control import control_world


@pytest.fixture(autouse=True)
def invariants_hold_at_the_end() -> Iterator[None]:
    control_world.made.clear()
    yield
    while control_world.made:
        control_world.made.pop().check()
