import multiprocessing
import os
import sys

import pytest

from mlx_dp.orchestrator.model.model_cache import ModelCache, gguf_model
from mlx_dp.proto.errors import ConfigError
from tests.support.models.silent_progress import SilentProgress


def names_in(cache_dir):
    return sorted(path.name for path in (cache_dir / "models").iterdir())


def prepare(gguf, cache_dir, stages, begin):
    class Recorder:
        def update(self, stage, done, total):
            stages.put((os.getpid(), stage))

    begin.wait()
    gguf_model(ModelCache(cache_dir, Recorder()), gguf, "float32")


def test_leftovers_of_a_killed_process_are_swept_and_models_are_not(tmp_path):
    models = tmp_path / "models"
    (models / ".half.123.tmp").mkdir(parents=True)
    (models / ".half.123.tmp" / "model.safetensors").write_text("half")
    (models / ".file.tmp").touch()
    (models / "whole").mkdir()
    with ModelCache(tmp_path, SilentProgress()).locked():
        assert names_in(tmp_path) == [".lock", "whole"]


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    script = tmp_path / "python"
    # The ninth argument is where the model should go.
    script.write_text('#!/bin/sh\nmkdir "$(dirname "$9")/.x.1.tmp" && echo boom >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="boom"):
        gguf_model(ModelCache(tmp_path, SilentProgress()), gguf, "float32")
    assert names_in(tmp_path) == [".lock"]


@pytest.mark.mlx
@pytest.mark.system
def test_a_conversion_stopped_inside_a_workspace_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise SystemExit(0)

    monkeypatch.setattr("mlx_dp.orchestrator.model.model_cache.run_child", stop)
    cache = ModelCache(tmp_path, SilentProgress())
    target = cache.path_of("x", "0" * 8, "float32")
    with pytest.raises(SystemExit), cache.locked() as lock, cache.workspace() as folder:
        cache.convert(folder / "x.gguf", target, "float32", lock)
    assert names_in(tmp_path) == [".lock"]


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path, make_gguf):
    tiny = make_gguf()
    gguf = tiny.write(tmp_path / "tiny.gguf")
    cache = ModelCache(tmp_path, SilentProgress())
    first = gguf_model(cache, gguf, "float32")
    assert first.name.startswith("tiny-")
    assert first.name.endswith("-float32-v1")
    made = (first / "config.json").stat().st_mtime_ns
    assert gguf_model(cache, gguf, "float32") == first
    assert (first / "config.json").stat().st_mtime_ns == made
    facts = gguf.stat()
    os.utime(gguf, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    second = gguf_model(cache, gguf, "float32")
    assert second != first
    assert names_in(tmp_path) == sorted([".lock", first.name, second.name])


@pytest.mark.mlx
@pytest.mark.system
def test_two_starts_at_once_convert_once(tmp_path, make_gguf):
    gguf = make_gguf().write(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("spawn")
    stages, begin = context.Queue(), context.Barrier(2)
    starts = [
        context.Process(target=prepare, args=(gguf, tmp_path, stages, begin)) for _ in range(2)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join(60)
        assert start.exitcode == 0
    seen = []
    while not stages.empty():
        seen.append(stages.get())
    converting = {pid for pid, stage in seen if stage == "Converting the model"}
    assert len(converting) == 1
    assert len(names_in(tmp_path)) == 2
