"""An editor with pyright follows every import between the four folders.

The folders are imported as mlx_dp.*, which only an install maps to them. For an editor there are
links in build/typing, which the scripts make, and ``[tool.pyright]``, which names them.
"""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("orchestrator", "worker", "kvcache", "proto")
BROKEN: Final = (
    "from mlx_dp.proto.messages.events import NoSuchMessage",
    "from mlx_dp.no_such_folder import anything",
)


def imports() -> Iterator[str]:
    """Every name that our sources import from each other, as one import each."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_dp."):
                    yield from (f"from {node.module} import {each.name}" for each in node.names)


def faults(lines: list[str], file: Path) -> set[str]:
    """Pyright's complaints, with the project's settings."""
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode in (0, 1), found.stdout + found.stderr
    diagnostics = json.loads(found.stdout)["generalDiagnostics"]
    return {lines[each["range"]["start"]["line"]] for each in diagnostics}


@pytest.mark.slow
def test_pyright_follows_all_imports_and_finds_broken_ones(tmp_path: Path) -> None:
    ours = sorted(set(imports()))
    assert len(ours) > 500
    assert faults([*ours, *BROKEN], tmp_path / "imports.py") == set(BROKEN)


def test_the_settings_name_the_link_of_each_folder() -> None:
    # Given only their parent, pyright would check nothing and report success.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    assert settings["include"] == [f"build/typing/mlx_dp/{folder}" for folder in FOLDERS]
    assert "build/typing" in settings["extraPaths"]
