"""mlx-lm's own errors, provoked through mlx-lm, and reported with the file and a remedy."""

import json
from pathlib import Path

import pytest

from mlx_dp.worker.loading.model_fault import describe_fault

pytestmark = pytest.mark.mlx


def described(directory: Path) -> str:
    from mlx_lm.utils import load_model

    with pytest.raises((ValueError, TypeError, KeyError)) as raised:
        load_model(directory, lazy=True)
    said = describe_fault(directory, raised.value)
    assert str(directory) in said
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.support.models.tiny_models import DENSE

    return DENSE["llama"].write(tmp_path / "model")


def change_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(model: Path, change) -> None:
    import mlx.core as mx

    path = str(model / "model.safetensors")
    weights = dict(mx.load(path))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})


def test_an_unknown_type_is_named_with_the_version_that_does_not_know_it(model: Path) -> None:
    change_config(model, model_type="nosuch")
    said = described(model)
    assert "config.json says model_type 'nosuch', which mlx-lm " in said
    assert "pip install -U mlx-lm" in said


def test_tensors_that_are_missing_are_named(model: Path) -> None:
    def drop(weights) -> None:
        for name in sorted(weights)[:5]:
            del weights[name]

    change_weights(model, drop)
    said = described(model)
    assert "lack tensors that config.json asks for (lm_head.weight, " in said
    assert ", 2 more): " in said
    assert said.endswith("so copy or download it again")


def test_tensors_without_a_place_are_named(model: Path) -> None:
    def add(weights) -> None:
        weights["extra.weight"] = next(iter(weights.values()))

    change_weights(model, add)
    assert "has no place for (extra.weight): config.json and the weights" in described(model)


def test_a_tensor_of_another_shape_is_named_with_both(model: Path) -> None:
    def cut(weights) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:3]

    change_weights(model, cut)
    said = described(model)
    assert "model.norm.weight in shape (3,), and config.json asks for (" in said


def test_any_other_error_names_the_config(model: Path) -> None:
    change_config(model, hidden_size="big")
    said = described(model)
    assert said.startswith("mlx-lm cannot build the model that ")
    assert "config.json describes (TypeError: " in said
