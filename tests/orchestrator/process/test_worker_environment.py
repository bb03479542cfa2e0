"""What workers inherit, and what they get beside it."""

import sys

import pytest

from mlx_dp.orchestrator.model.model_probe import DeviceFacts
from mlx_dp.orchestrator.preparation import PreparedModel
from mlx_dp.orchestrator.process import worker_environment as module
from mlx_dp.orchestrator.process.memory_share import SharedMemory
from mlx_dp.orchestrator.process.worker_environment import worker_environment

OURS = {"PATH": "/bin"}


def on(kind, cuda_devices: tuple[str, ...] = ()) -> PreparedModel:
    return PreparedModel(
        served_name="m",
        device=DeviceFacts(kind=kind, name="d", memory_nbytes=1, working_set_nbytes=1),
        memory=SharedMemory(nbytes=1, devices=1, description="test"),
        cuda_devices=cuda_devices,
    )


def test_workers_get_ours_and_write_at_once() -> None:
    given = worker_environment(OURS, PreparedModel(served_name="fake"), workers=2).of(0)
    assert given == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}


def test_a_linux_cpu_gets_a_blas_or_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.setattr(module, "find_openblas", lambda: "libopenblas.so.0")
    given = worker_environment(OURS, on("cpu"), workers=4)
    assert given.of(3)["LD_PRELOAD"] == "libopenblas.so.0"
    assert given.of(3)["OPENBLAS_NUM_THREADS"] == "2"
    assert given.warning is None
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    assert worker_environment(OURS, on("cpu"), workers=4).warning is not None


@pytest.mark.parametrize(("platform", "kind"), [("darwin", "metal"), ("linux", "cuda")])
def test_other_devices_need_none(platform: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    given = worker_environment(OURS, on(kind), workers=2)
    assert given.warning is None
    assert "LD_PRELOAD" not in given.of(0)


def test_each_cuda_worker_sees_its_own_device() -> None:
    given = worker_environment(OURS, on("cuda", ("GPU-a", "GPU-b")), workers=2)
    assert [given.of(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["GPU-a", "GPU-b"]
