"""Fixtures of the conformance suite; its tables are in the plugin ``tables`` of its support."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.conformance.model_under_test import ModelUnderTest
    from tests.support.worker.chosen_forms import ChosenForms


@pytest.fixture(scope="session")
def under_test() -> Iterator[Callable[[str], "ModelUnderTest"]]:
    """Returns a model by its name, and keeps the last one: its scenarios run one after another."""
    from tests.support.conformance.model_under_test import ModelUnderTest

    last: list[ModelUnderTest] = []
    with TemporaryDirectory() as scratch:

        def model(name: str) -> ModelUnderTest:
            if not last or last[0].name != name:
                last[:] = [ModelUnderTest(name, Path(scratch) / name)]
            return last[0]

        yield model


@pytest.fixture(scope="session")
def forms() -> "ChosenForms":
    """What the check of batches found for each model: it is the same in all scenarios."""
    from tests.support.worker.chosen_forms import ChosenForms

    return ChosenForms()
