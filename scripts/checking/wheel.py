#!/usr/bin/env python3
"""Check an installed wheel in its own environment, away from the repository (see scripts/check)."""

import importlib
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = ("mlx_dp.orchestrator", "mlx_dp.worker", "mlx_dp.kvcache", "mlx_dp.proto")
SITE = Path(sysconfig.get_path("purelib")).resolve()


def output_of(*command: str | Path) -> str:
    """Run a command that must succeed, and return its stdout."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = " ".join(map(str, command))
        sys.exit(f"{words} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def file_in_child() -> str:
    return str(importlib.import_module("mlx_dp.proto").__file__)


def check_imports() -> None:
    for package in PACKAGES:
        folder = Path(str(importlib.import_module(package).__file__)).resolve().parent
        assert folder.is_relative_to(SITE), f"{package} comes from {folder}, not from the wheel"
        assert (folder / "py.typed").is_file(), f"{package} lost its py.typed"


def check_neighbour() -> None:
    """``proto`` is also proto-plus' package: our folder of that name must not have replaced it."""
    # In a child: our own sources may not import it, and test_arrows would find the import here.
    code = "import proto; print(proto.__file__, hasattr(proto, 'Message'))"
    output = output_of(sys.executable, "-I", "-c", code).strip()
    assert output.endswith("True"), f"proto is not proto-plus' own: {output}"


def check_controller_is_device_free() -> None:
    """Check that the whole controller loads without MLX, which would open the device."""
    code = (
        "import sys, mlx_dp.orchestrator.cli.commands;"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])"
    )
    loaded = output_of(sys.executable, "-I", "-c", code).strip()
    assert loaded == "[]", f"importing the controller loads {loaded}"


def check_commands() -> None:
    console = Path(sys.executable).parent / "mlx-dp"
    assert "serve" in output_of(console, "--help")
    version = importlib.metadata.version("mlx-dp")
    output = output_of(console, "--version")
    assert version in output, f"mlx-dp --version says {output!r}, the wheel is {version}"
    assert "usage" in output_of(sys.executable, "-m", "mlx_dp.worker", "--help").lower()


def check_spawned_child() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = Path(pool.apply(file_in_child)).resolve()
    assert child.is_relative_to(SITE), f"a spawned child imports {child}"


def main() -> None:
    assert not (Path.cwd() / "proto").exists(), (
        f"run this from another directory than {os.getcwd()}"
    )
    for check in (
        check_imports,
        check_neighbour,
        check_controller_is_device_free,
        check_commands,
        check_spawned_child,
    ):
        check()


if __name__ == "__main__":
    main()
