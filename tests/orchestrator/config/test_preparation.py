"""The names of a model: from its flags, and its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_dp.orchestrator.config import preparation
from mlx_dp.orchestrator.config.flags import ModelFlags
from mlx_dp.orchestrator.config.preparation import PreparedModel, prepare_model
from mlx_dp.orchestrator.model.model_probe import DeviceFacts, ModelProbe
from mlx_dp.orchestrator.model.model_source import ResolvedModel
from mlx_dp.proto.capacity.model_shape import ModelShape
from tests.support.control.flag_values import FAKE_MODEL, flags

SHAPE = ModelShape(
    num_layers=1,
    attention_layers=1,
    auxiliary_layers=0,
    kv_bytes_per_token=1,
    auxiliary_bytes_per_slot=0,
    vocab_size=9,
    context_length=9,
    weights_nbytes=1,
)


def names(model: PreparedModel) -> tuple[str, ...]:
    return (model.served_name, *model.served_aliases)


def test_a_model_is_served_by_the_names_of_its_flag_once_each_in_their_order() -> None:
    for given, served in ((None, ("fake",)), (["b", "a", "b"], ("b", "a"))):
        model = prepare_model(flags(model=replace(FAKE_MODEL, served_model_name=given)), {})
        assert names(model) == served
        assert model.own_names == ("fake",)


@pytest.mark.parametrize("given", [None, ["chat"]])
def test_its_hub_id_and_path_stay_names_whatever_it_is_served_as(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: list[str] | None
) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    resolved = ResolvedModel(path=link, served_name="org/name")
    device = DeviceFacts(kind="cpu", name="cpu", memory_nbytes=10**9, working_set_nbytes=10**9)
    probe = ModelProbe(shape=SHAPE, device=device, rank_weights=None)
    monkeypatch.setattr(preparation, "resolve_model", lambda *_, **__: resolved)
    monkeypatch.setattr(preparation, "probe_model", lambda *_, **__: probe)
    model = prepare_model(flags(model=ModelFlags(model="~/link", served_model_name=given)), {})
    assert names(model) == tuple(given or ["org/name"])
    assert model.own_names == ("org/name", "~/link", str(link), str(folder))
