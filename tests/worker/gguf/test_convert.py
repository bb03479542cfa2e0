import json
import os
import signal
import subprocess
import sys

import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm import generate, load  # noqa: E402

from mlx_dp.orchestrator.model.model_cache import ModelCache  # noqa: E402
from mlx_dp.worker.gguf.convert import main  # noqa: E402
from tests.support.models.silent_progress import SilentProgress  # noqa: E402

pytestmark = pytest.mark.mlx

# The conversion as it is, except that it stops for good where it would write the weights.
STUCK_CHILD = """
import sys, time
import mlx.core as mx
def stop(*args, **kwargs):
    print("stuck", flush=True)
    time.sleep(600)
mx.save_safetensors = stop
from mlx_dp.worker.gguf.convert import main
main(sys.argv[1:])
"""


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("storage", ["float32", "4bit"])
def test_mlx_lm_loads_and_runs_the_directory(tmp_path, make_gguf, capsys, storage):
    tiny = make_gguf()
    source = tiny.write(tmp_path / "tiny.gguf")
    target = tmp_path / "models" / "tiny"
    assert main([str(source), str(target), "--dtype", storage]) == 0
    lines = lines_of(capsys)
    assert lines[-1] == {"stage": "write", "done": 1, "total": 1}
    assert [line["done"] for line in lines[:-2]] == list(range(21))
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    model, tokenizer = load(str(target))
    assert tokenizer.eos_token_ids == {2}
    ids = mx.array([tokenizer.encode(" the end")])
    tolerance = 1e-6 if storage == "float32" else 5e-2
    assert mx.allclose(model(ids), tiny.model(ids), atol=tolerance).item()


def test_a_file_that_cannot_be_converted_leaves_one_sentence(tmp_path, make_gguf, capsys):
    tiny = make_gguf()
    tiny.metadata["tokenizer.ggml.pre"] = "martian"
    source = tiny.write(tmp_path / "tiny.gguf")
    target = tmp_path / "models" / "tiny"
    assert main([str(source), str(target)]) == 1
    (line,) = lines_of(capsys)
    assert "'martian'" in line["error"]
    assert list(target.parent.iterdir()) == []


def test_a_missing_file_leaves_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "no.gguf"), str(tmp_path / "x")]) == 1
    assert "no.gguf" in lines_of(capsys)[0]["error"]


@pytest.mark.system
def test_a_killed_conversion_leaves_nothing_that_a_later_start_would_use(tmp_path, make_gguf):
    source = make_gguf().write(tmp_path / "tiny.gguf")
    models = tmp_path / "models"
    target = models / "tiny"
    command = [sys.executable, "-c", STUCK_CHILD, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "stuck\n" in iter(child.stdout.readline, "")
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    (leftover,) = models.iterdir()
    assert leftover.name.startswith(".tiny.")
    with ModelCache(tmp_path, SilentProgress()).locked():
        assert [path.name for path in models.iterdir()] == [".lock"]


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france(demo_model_dir):
    model, tokenizer = load(str(demo_model_dir))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=16)
    greeting = [{"role": "user", "content": "hi"}]
    assert len(tokenizer.apply_chat_template(greeting, add_generation_prompt=True)) == 31
