"""The CUDA device of each worker."""

from pathlib import Path

from mlx_dp.orchestrator.process.cuda_devices import cuda_devices, device_variables


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
