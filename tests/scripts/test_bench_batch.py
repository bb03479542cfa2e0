"""The benchmark of slabs and mixed chunks runs on a model."""

import pytest

pytest.importorskip("mlx.core")

from tests.support.models.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.mlx


def test_each_row_and_chunk_is_measured_in_both_ways(load, tmp_path, monkeypatch, capsys):
    batch = load("benchmarks.engine.batch")
    monkeypatch.setattr(batch, "MIXES", {"two widths": [5, 300]})
    monkeypatch.setattr(batch, "ROWS", (2,))
    model = ARCHITECTURES["llama"].write(tmp_path)
    assert batch.main(["--model", str(model), "--rounds", "1", "--steps", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows if row.endswith("x |")] == [
        "| two widths",
        *(f"| 2 rows decode, {size} tokens prefill" for size in (16, 32, 64)),
    ]


def test_a_model_with_states_is_refused_in_a_sentence(load, tmp_path, capsys):
    batch = load("benchmarks.engine.batch")
    model = ARCHITECTURES["qwen3_next"].write(tmp_path)
    assert batch.main(["--model", str(model)]) == 2
    assert "use a model whose layers all keep every token" in capsys.readouterr().err
