import json
import platform
import sys

import pytest

from mlx_dp.orchestrator.model.model_directory import ModelSourceError
from mlx_dp.orchestrator.model.model_source import host_device, resolve_model
from tests.support.models.silent_progress import SilentProgress


@pytest.fixture
def resolve(tmp_path):
    def call(model, *, revision=None, device="cpu", **trust):
        return resolve_model(
            model,
            revision=revision,
            cache_dir=tmp_path / "cache",
            progress=SilentProgress(),
            device=device,
            **trust,
        )

    return call


LLAMA = {"model_type": "llama"}


def model_dir(path, *, config=None, weights="model.safetensors"):
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / weights).touch()
    (path / "tokenizer.json").touch()
    return path


def test_a_model_directory_is_taken_as_it_is(tmp_path, resolve):
    path = model_dir(tmp_path / "my-model", config={"model_type": "llama"})
    resolved = resolve(str(path))
    assert resolved.path == path
    assert resolved.served_name == "my-model"


def test_a_relative_directory_is_served_by_its_own_name(tmp_path, resolve, monkeypatch):
    path = model_dir(tmp_path / "my-model", config={"model_type": "llama"})
    monkeypatch.chdir(path)
    assert resolve(".").served_name == "my-model"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "has no config.json"),
        ({"config": "{"}, "not valid JSON"),
        ({"config": "[]"}, "not a JSON object"),
        ({"config": LLAMA, "weights": "pytorch_model.bin"}, "has no weights"),
        ({"config": {"model_file": "evil.py"}}, "needs its own code"),
    ],
)
def test_a_directory_that_cannot_be_served_is_refused(tmp_path, resolve, facts, words):
    path = model_dir(tmp_path / "x", **facts)
    with pytest.raises(ModelSourceError, match=words):
        resolve(str(path))


def test_a_directory_with_code_is_taken_from_those_who_trust_it(tmp_path, resolve):
    path = model_dir(tmp_path / "x", config={"model_file": "own.py"})
    with pytest.raises(ModelSourceError, match="--trust-remote-code"):
        resolve(str(path))
    assert resolve(str(path), trust_remote_code=True).path == path


def test_an_auto_map_alone_runs_nothing_and_is_no_reason_to_refuse(tmp_path, resolve):
    path = model_dir(tmp_path / "x", config={**LLAMA, "auto_map": {"AutoModel": "x.Y"}})
    assert resolve(str(path)).path == path


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "../model", "~/model", "m.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(
    tmp_path, resolve, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelSourceError, match="does not exist"):
        resolve(name)


def test_an_empty_name_is_not_the_current_directory(resolve):
    with pytest.raises(ModelSourceError, match="--model is empty"):
        resolve("")


def test_a_file_that_is_no_gguf_is_refused(tmp_path, resolve):
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ModelSourceError, match=r"neither a directory nor a \.gguf file"):
        resolve(str(path))


def test_a_revision_needs_a_hub_id(tmp_path, resolve):
    directory = model_dir(tmp_path / "x", config={})
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    for model in (str(directory), str(gguf), None):
        with pytest.raises(ModelSourceError, match="--revision v1 works with a hub id only"):
            resolve(model, revision="v1")


def test_a_hub_id_is_served_by_that_id(tmp_path, resolve, monkeypatch):
    path = model_dir(tmp_path / "snapshot", config=LLAMA)
    monkeypatch.setattr("mlx_dp.orchestrator.model.hub_model.hub_model", lambda *_, code: path)
    resolved = resolve("org/name", revision="v1")
    assert resolved.served_name == "org/name"


@pytest.mark.parametrize(
    ("link", "asked"),
    [
        ("https://huggingface.co/org/name", ("org/name", None)),
        ("https://hf.co/org/name/", ("org/name", None)),
        ("huggingface.co/org/name?library=mlx", ("org/name", None)),
        ("hf://org/name", ("org/name", None)),
        ("https://huggingface.co/org/name/tree/v1", ("org/name", "v1")),
        ("https://huggingface.co/org/name/blob/main/config.json", ("org/name", "main")),
    ],
)
def test_a_link_to_the_hub_means_the_model_behind_it(tmp_path, resolve, monkeypatch, link, asked):
    path = model_dir(tmp_path / "snapshot", config=LLAMA)
    calls = []

    def hub_model(name, revision, progress, *, code):
        calls.append((name, revision))
        return path

    monkeypatch.setattr("mlx_dp.orchestrator.model.hub_model.hub_model", hub_model)
    assert resolve(link).served_name == "org/name"
    assert calls == [asked]


@pytest.mark.parametrize("query", ["", "?download=true"])
def test_a_link_to_a_gguf_file_is_told_to_be_one(resolve, query):
    link = f"https://huggingface.co/org/name-GGUF/resolve/main/name.Q4_0.gguf{query}"
    with pytest.raises(ModelSourceError, match="link to one file: download it, and give its path"):
        resolve(link)


def test_a_link_and_another_revision_are_refused(resolve):
    with pytest.raises(ModelSourceError, match="--revision v2 is not the v1 of the link"):
        resolve("https://huggingface.co/org/name/tree/v1", revision="v2")


@pytest.mark.parametrize("name", ["~nobody-here/model", "~nobody-here"])
def test_the_home_of_a_user_who_is_not_here_is_refused(resolve, name):
    with pytest.raises(ModelSourceError, match="names no home directory on this machine"):
        resolve(name)


def test_a_home_directory_is_found_behind_a_quoted_tilde(tmp_path, resolve, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = model_dir(tmp_path / "my-model", config=LLAMA)
    assert resolve("~/my-model").path == path


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path, resolve, monkeypatch):
    converted = model_dir(tmp_path / "converted", config=LLAMA)
    asked = []

    def gguf_model(cache, gguf, storage):
        asked.append(gguf)
        return converted

    monkeypatch.setattr("mlx_dp.orchestrator.model.model_source.gguf_model", gguf_model)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small.gguf").touch()
    assert resolve(str(folder)).served_name == "small"
    assert asked == [folder / "small.gguf"]
    (folder / "other.gguf").touch()
    with pytest.raises(ModelSourceError, match=r"2 \.gguf files .*: name the one to serve, as in"):
        resolve(str(folder))


@pytest.mark.mlx
@pytest.mark.system
@pytest.mark.parametrize(("device", "storage"), [("cpu", "float32"), ("metal", "4bit")])
def test_a_gguf_file_is_stored_as_the_device_likes_it(
    tmp_path, resolve, make_gguf, device, storage
):
    gguf = make_gguf().write(tmp_path / "tiny.gguf")
    resolved = resolve(str(gguf), device=device)
    assert f"-{storage}-" in resolved.path.name
    assert resolved.served_name == "tiny"
    assert (resolved.path / "model.safetensors").is_file()


def test_apple_silicon_is_metal_and_all_else_is_cpu(monkeypatch):
    for system, machine, device in [
        ("darwin", "arm64", "metal"),
        ("darwin", "x86_64", "cpu"),
        ("linux", "aarch64", "cpu"),
    ]:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert host_device() == device
