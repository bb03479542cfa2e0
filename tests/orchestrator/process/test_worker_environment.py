"""Environment variables that workers inherit, and those that they get in addition."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from mlx_dp.orchestrator.process import worker_environment as module
from mlx_dp.orchestrator.process.worker_environment import (
    WorkerEnvironment,
    cuda_devices,
    device_variables,
    worker_environment,
)

OURS = {"PATH": "/bin"}


def given_on(
    device: str | None,
    cuda_devices: tuple[str, ...] = (),
    workers: int = 2,
    *,
    environment: Mapping[str, str] = OURS,
    float32: bool = False,
    platform: str = "linux",
) -> WorkerEnvironment:
    return worker_environment(
        environment,
        device=device,
        cuda_devices=cuda_devices,
        workers=workers,
        float32=float32,
        platform=platform,
    )


def test_workers_get_ours_and_write_at_once() -> None:
    given = given_on(None).for_worker(0)
    assert given == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}


def test_a_linux_cpu_gets_a_blas_or_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module, "find_openblas", lambda: "libopenblas.so.0")
    given = given_on("cpu", workers=4)
    assert given.for_worker(3)["LD_PRELOAD"] == "libopenblas.so.0"
    assert given.for_worker(3)["OPENBLAS_NUM_THREADS"] == "2"
    assert given.warning is None
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    assert given_on("cpu", workers=4).warning is not None


@pytest.mark.parametrize(("platform", "kind"), [("darwin", "metal"), ("linux", "cuda")])
def test_other_devices_need_none(platform: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    given = given_on(kind, platform=platform)
    assert given.warning is None
    assert "LD_PRELOAD" not in given.for_worker(0)


def test_each_cuda_worker_sees_its_own_device() -> None:
    given = given_on("cuda", ("GPU-a", "GPU-b"))
    assert [given.for_worker(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == [
        "GPU-a",
        "GPU-b",
    ]


def test_float32_models_are_not_rounded_to_tf32_on_a_mac() -> None:
    given = given_on("metal", float32=True, platform="darwin")
    assert given.for_worker(1)["MLX_ENABLE_TF32"] == "0"


@pytest.mark.parametrize(
    ("float32", "platform"), [(False, "darwin"), (True, "linux"), (False, "linux")]
)
def test_other_models_and_systems_keep_what_mlx_does(float32: bool, platform: str) -> None:
    given = given_on("metal", float32=float32, platform=platform)
    assert "MLX_ENABLE_TF32" not in given.for_worker(0)


def test_a_users_own_choice_about_tf32_stays() -> None:
    chosen = {**OURS, "MLX_ENABLE_TF32": "1"}
    given = given_on("metal", environment=chosen, float32=True, platform="darwin")
    assert given.for_worker(0)["MLX_ENABLE_TF32"] == "1"


def tool(folder: Path, script: str) -> dict[str, str]:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


def test_devices_are_named_by_the_driver_tool(tmp_path: Path) -> None:
    assert cuda_devices(tool(tmp_path, "echo GPU-a; echo GPU-b")) == ("GPU-a", "GPU-b")


def test_a_restriction_of_the_user_holds(tmp_path: Path) -> None:
    environment = tool(tmp_path, "echo GPU-a") | {"CUDA_VISIBLE_DEVICES": "3, 1"}
    assert cuda_devices(environment) == ("3", "1")


def test_no_tool_or_a_failing_one_means_no_devices(tmp_path: Path) -> None:
    assert cuda_devices({"PATH": str(tmp_path)}) == ()
    assert cuda_devices(tool(tmp_path, "exit 9")) == ()


def test_workers_take_the_devices_in_turn() -> None:
    assert device_variables((), 0) == {}
    given = [device_variables(("a", "b"), index)["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert given == ["a", "b", "a"]
