"""The contents of the wheel, and the promises of the metadata.

A folder missing from ``packages`` is invisible in an editable install and absent from the wheel.
"""

import ast
import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("orchestrator", "worker", "kvcache", "proto")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def source_folders() -> set[str]:
    return {
        path.parent.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_is_typed(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()
    assert (ROOT / folder / "py.typed").is_file()


def test_every_folder_with_sources_is_a_package() -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]
    assert {f"mlx_dp.{folder.replace('/', '.')}" for folder in source_folders()} == set(packages)


def test_every_top_level_package_is_mapped_to_its_folder() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {f"mlx_dp.{folder}": folder for folder in FOLDERS}


def test_no_file_makes_mlx_dp_a_regular_package() -> None:
    # An __init__.py there would hide the packages that the mapping adds to the namespace.
    assert not (ROOT / "mlx_dp").exists()


def test_every_script_is_executable() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    scripts.append(ROOT / ".ci" / "run")
    started = {path for path in scripts if path.read_bytes().startswith(b"#!")}
    assert started == {path for path in scripts if os.access(path, os.X_OK)}
    # One without a suffix is for running; setup-venv is for sourcing.
    bare = {path for path in scripts if not path.suffix and path.name != "setup-venv"}
    assert bare <= started


@pytest.mark.parametrize(
    ("name", "platform", "floor"),
    [("mlx", "darwin", "0.32.2"), ("mlx[cpu]", "linux", "0.32.2"), ("mlx-lm", "", "0.32.2")],
)
def test_the_floors_of_mlx_are_declared(name: str, platform: str, floor: str) -> None:
    marker = rf"; sys_platform == '{platform}'" if platform else ""
    wanted = re.compile(rf"{re.escape(name)}>={re.escape(floor)}{re.escape(marker)}")
    assert any(wanted.fullmatch(line) for line in PROJECT["project"]["dependencies"])


def test_python_3_11_is_enough() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"


PARTS_OF: Final = {"pydantic_core": "pydantic", "markupsafe": "jinja2", "h11": "uvicorn"}
"""Packages that their maintainers release together, and that we name by the outer one."""


def imported_modules() -> set[str]:
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"mlx_dp"}


def test_the_default_install_brings_everything_that_is_imported() -> None:
    declared = {
        re.split(r"[\[<>=;]", line)[0].lower() for line in PROJECT["project"]["dependencies"]
    }
    distributions = importlib.metadata.packages_distributions()
    for module in sorted(imported_modules()):
        names = {
            PARTS_OF.get(module, name).replace("_", "-").lower() for name in distributions[module]
        }
        assert names & declared, f"{module} comes with {names}, which no dependency names"
