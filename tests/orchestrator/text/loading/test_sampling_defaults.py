"""Sampling defaults of a model's generation_config.json: what no request could have is left out."""

import json
import logging
from pathlib import Path

import pytest

from mlx_dp.orchestrator.text.loading.model_files import read_facts
from mlx_dp.proto.messages.sampling_params import SamplingParams


def defaults(directory: Path, content: str) -> SamplingParams:
    (directory / "generation_config.json").write_text(content)
    return read_facts(directory, vocab_size=10, eos_token_ids=()).sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [0.7]),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_k", float("inf")),
    ],
)
def test_a_default_out_of_range_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    others = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    with caplog.at_level(logging.WARNING):
        found = defaults(tmp_path, json.dumps({**others, name: value}))
    usual = getattr(SamplingParams(), name)
    assert found == SamplingParams(**{**others, name: usual})
    [record] = caplog.records
    said = record.getMessage()
    assert str(tmp_path / "generation_config.json") in said
    assert f"{name} is ignored" in said
    assert ascii(value) in said


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({}, SamplingParams()),
        ({"temperature": None, "top_k": None}, SamplingParams()),
        (
            {"temperature": 0, "top_k": 20.0, "top_p": 1},
            SamplingParams(temperature=0.0, top_k=20),
        ),
        ({"top_k": -1}, SamplingParams(top_k=0)),
    ],
)
def test_defaults_in_range_are_taken_in_silence(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: dict[str, object],
    found: SamplingParams,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert defaults(tmp_path, json.dumps(content)) == found
    assert not caplog.records


def test_a_long_value_is_shown_in_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        defaults(tmp_path, json.dumps({"top_p": "x\n" * 10_000}))
    assert len(caplog.records[0].getMessage()) < 400
    assert "\n" not in caplog.records[0].getMessage()
