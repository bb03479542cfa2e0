import json
import sys

import pytest

from mlx_dp.orchestrator.model.model_probe import DeviceFacts, probe_model
from mlx_dp.proto.capacity.model_shape import ModelShape, RankWeights
from mlx_dp.proto.errors import ConfigError

SHAPE = {
    "num_layers": 4,
    "attention_layers": 1,
    "auxiliary_layers": 3,
    "kv_bytes_per_token": 256,
    "auxiliary_bytes_per_slot": 9000,
    "vocab_size": 300,
    "context_length": 512,
    "weights_nbytes": 100_000,
}
DEVICE = {"kind": "cpu", "name": "x", "memory_nbytes": 1000, "working_set_nbytes": 900}
ANSWER = {"model_type": "qwen3_next", "shape": SHAPE, "quantization_bits": 4, "device": DEVICE}


@pytest.fixture
def fake_probe(tmp_path, monkeypatch):
    def install(output):
        answer = tmp_path / "answer"
        answer.write_text(output)
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\ncat "{answer}"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


def test_the_childs_answer_is_read_into_values(tmp_path, fake_probe):
    fake_probe(json.dumps(ANSWER))
    probe = probe_model(tmp_path)
    assert probe.shape == ModelShape(**SHAPE)
    assert probe.device == DeviceFacts(**DEVICE)


def test_no_answer_is_an_error(tmp_path, fake_probe):
    fake_probe("")
    with pytest.raises(ConfigError, match="0 answers"):
        probe_model(tmp_path)


@pytest.mark.parametrize("trusts", [False, True])
def test_the_child_hears_whether_the_models_code_is_trusted(tmp_path, monkeypatch, trusts):
    asked = []

    def run_child(arguments, take, *, timeout_s):
        asked.extend(arguments)
        take(ANSWER)

    monkeypatch.setattr("mlx_dp.orchestrator.model.model_probe.run_child", run_child)
    probe_model(tmp_path, trust_remote_code=trusts)
    assert ("--trust-remote-code" in asked) == trusts


@pytest.mark.parametrize("divides", [False, True])
def test_the_child_hears_whether_the_vocabulary_is_divided(tmp_path, monkeypatch, divides):
    asked = []

    def run_child(arguments, take, *, timeout_s):
        asked.extend(arguments)
        take(ANSWER)

    monkeypatch.setattr("mlx_dp.orchestrator.model.model_probe.run_child", run_child)
    probe_model(tmp_path, ranks=2, vocabulary=divides)
    assert asked == ["probe", str(tmp_path), "--ranks", "2", *(["--vocabulary"] if divides else [])]


@pytest.mark.mlx
@pytest.mark.system
def test_a_directory_without_a_model_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="mlx-lm cannot build the model that"):
        probe_model(tmp_path)


@pytest.mark.mlx
@pytest.mark.system
@pytest.mark.model
def test_the_demo_models_sizes_and_the_mlps_that_three_ranks_share(demo_model_dir):
    probe = probe_model(demo_model_dir, ranks=3)
    shape = probe.shape
    assert (shape.num_layers, shape.attention_layers, shape.auxiliary_layers) == (30, 30, 0)
    assert shape.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert (shape.vocab_size, shape.context_length) == (49_152, 8_192)
    assert shape.weights_nbytes == 538_060_032
    mlps = 30 * 3 * 576 * 1536 * 4
    assert probe.rank_weights == RankWeights(nbytes=(shape.weights_nbytes - mlps * 2 // 3,) * 3)


def test_what_ranks_would_hold_is_read_when_it_was_asked_for(tmp_path, fake_probe):
    fake_probe(json.dumps({**ANSWER, "rank_weights": {"nbytes": [60_000, 59_000]}}))
    assert probe_model(tmp_path, ranks=2).rank_weights == RankWeights(nbytes=(60_000, 59_000))


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("name", "dtype", "float32", "unbatchable"),
    [
        ("llama", "float32", True, None),
        ("llama", "bfloat16", False, None),
        ("llama4", "float32", True, "no batch can hold ChunkedKVCache caches"),
    ],
)
def test_the_probe_tells_precision_and_what_no_batch_can_hold(
    tmp_path, monkeypatch, name, dtype, float32, unbatchable
):
    mx = pytest.importorskip("mlx.core")
    from mlx_dp.worker import model_probe
    from tests.support.models.tiny_models import ARCHITECTURES

    model = ARCHITECTURES[name].build()
    model.set_dtype(getattr(mx, dtype))
    monkeypatch.setattr(model_probe, "check_weight_files", lambda _: None)
    monkeypatch.setattr(
        model_probe, "load_model", lambda *_, **__: (model, dict(ARCHITECTURES[name].config))
    )
    answer = model_probe.probe_model(tmp_path)
    assert (answer["float32"], answer["unbatchable"]) == (float32, unbatchable)
