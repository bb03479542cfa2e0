"""Remembers the result of the batch check, for tests that load a model many times."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.worker.engine import mlx_engine
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel


class ChosenForms:
    """The form of each model, by name.

    The check takes most of a start on a CPU, and its result is the same each time.
    """

    def __init__(self) -> None:
        self._forms: dict[str, BatchForm] = {}

    @contextmanager
    def remembered(self, name: str) -> Iterator[None]:
        """Load the model of this name, and no other."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mlx_engine, "choose_form", partial(self._choose, name))
            yield

    def _choose(self, name: str, loaded: LoadedModel) -> BatchForm:
        if name not in self._forms:
            self._forms[name] = choose_form(loaded)
        return self._forms[name]
