"""The architectures of the installed mlx-lm."""

import ast
from pathlib import Path

import mlx_lm.models

_CLASSES = {"Model", "ModelArgs"}


def installed_architectures() -> tuple[str, ...]:
    """Every module of ``mlx_lm.models`` that is a model, by its source: some fail to import."""
    (folder,) = mlx_lm.models.__path__
    return tuple(sorted(path.stem for path in Path(folder).glob("*.py") if _is_model(path)))


def _is_model(path: Path) -> bool:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names >= _CLASSES
