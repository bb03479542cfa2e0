"""The arrows between the folders, checked on the source text.

    orchestrator -> proto <- kvcache <- worker -> proto

Imports inside functions and for types alone count as well: cycles of types mislead checkers, and a
late import is how a forbidden one usually arrives.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "orchestrator": frozenset({"orchestrator", "proto"}),
    "worker": frozenset({"worker", "proto", "kvcache"}),
    "kvcache": frozenset({"kvcache", "proto"}),
    "proto": frozenset({"proto"}),
}
# Importing either one loads the device library.
DEVICE: Final = frozenset({"mlx", "mlx_lm"})
# Where the device library may not be named at all.
DEVICE_FREE_FOLDERS: Final = frozenset({"orchestrator", "proto"})
# The modules that a worker with ``--engine fake`` loads: importing them must not load the device
# library, not even through other modules. ``__main__`` must watch its parent before MLX
# loads.
DEVICE_FREE_FILES: Final = frozenset(
    f"worker/{name}.py"
    for name in (
        "__init__",
        "__main__",
        "contract/engine",
        "fake/engine",
        "loop",
        "parent_watch",
        "scheduling/scheduler",
        "startup",
    )
) | frozenset(
    f"kvcache/{name}.py"
    for name in (
        "__init__",
        "prefix/lease",
        "prefix/prefix_cache",
        "slots/auxiliary_slots",
        "slots/request_slots",
    )
)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name the tree imports; a relative import keeps its leading dots."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=module, level=level):
                prefix = "." * level + (f"{module}." if module else "")
                yield from (prefix + alias.name for alias in node.names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def violations(path: str, source: str) -> list[str]:
    """The forbidden imports of the file at ``path`` (relative to the root), as sentences."""
    folder = path.split("/")[0]
    found: list[str] = []
    for name in source_imports(source):
        head, *rest = name.split(".")
        if name.startswith("."):
            found.append(f"{path}: relative import {name}")
        elif head in ALLOWED:
            found.append(f"{path}: bare import {name}, say mlx_dp.{name}")
        elif head == "mlx_dp":
            allowed = ALLOWED.get(folder, ALLOWED.keys())
            if not rest or rest[0] not in allowed:
                found.append(f"{path}: {folder} may not import {name}")
        elif head in DEVICE and folder in DEVICE_FREE_FOLDERS:
            found.append(f"{path}: {folder} may not import {name}")
    return found


@functools.cache
def source_imports(source: str) -> tuple[str, ...]:
    """The names that a source imports, found once for all the tests that ask."""
    return tuple(imported_names(ast.parse(source)))


def run_at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that importing a module executes: no function bodies, nothing type-only."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(_bodies(node))


def _bodies(node: ast.stmt) -> list[ast.stmt]:
    bodies: list[ast.stmt] = []
    for field in ("body", "orelse", "finalbody"):
        bodies.extend(getattr(node, field, []))
    for branch in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        bodies.extend(branch.body)
    return bodies


@functools.cache
def loaded_names(source: str) -> tuple[str, ...]:
    """The dotted names that importing a module of this source loads directly."""
    return tuple(
        name
        for node in run_at_import(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_names(node)
    )


def files_of(sources: Mapping[str, str], name: str) -> Iterator[str]:
    """Our files that importing ``name`` executes: each package on the way, and the module."""
    head, *rest = name.split(".")
    if head != "mlx_dp":
        return
    for depth in range(1, len(rest) + 1):
        prefix = "/".join(rest[:depth])
        for path in (f"{prefix}/__init__.py", f"{prefix}.py"):
            if path in sources:
                yield path


def device_chain(sources: Mapping[str, str], start: str) -> list[str] | None:
    """The imports by which ``start`` loads the device library, or None when it does not."""
    chains = [[start]]
    seen = {start}
    while chains:
        chain = chains.pop(0)
        for name in loaded_names(sources[chain[-1]]):
            if name.split(".")[0] in DEVICE:
                return [*chain, name]
            for path in files_of(sources, name):
                if path not in seen:
                    seen.add(path)
                    chains.append([*chain, path])
    return None


def package_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ALLOWED
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def other_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_every_folder_has_sources() -> None:
    assert {path.split("/")[0] for path in package_sources()} == set(ALLOWED)


@pytest.mark.parametrize("sources", [package_sources(), other_sources()], ids=["packages", "rest"])
def test_imports_follow_the_arrows(sources: dict[str, str]) -> None:
    found = [line for path, text in sources.items() for line in violations(path, text)]
    assert not found, "\n".join(found)


def test_every_file_named_in_the_rules_exists() -> None:
    # Otherwise the rule would silently miss a renamed file.
    assert package_sources().keys() >= DEVICE_FREE_FILES


def test_control_modules_load_no_device_library() -> None:
    sources = package_sources()
    free = [
        path
        for path in sources
        if path in DEVICE_FREE_FILES or path.split("/")[0] in DEVICE_FREE_FOLDERS
    ]
    found = [" -> ".join(chain) for path in free if (chain := device_chain(sources, path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("orchestrator/a.py", "import mlx_dp.worker"),
        ("orchestrator/a.py", "from mlx_dp import worker"),
        ("orchestrator/a.py", "import os, mlx_dp.kvcache.slots as slots"),
        ("orchestrator/a.py", "import mlx_dp"),
        ("orchestrator/a.py", "def f() -> None:\n    from mlx_dp.worker.loop import WorkerLoop"),
        ("orchestrator/a.py", "if TYPE_CHECKING:\n    from mlx_dp.kvcache import slots"),
        ("orchestrator/a.py", "importlib.import_module('mlx_dp.worker')"),
        ("orchestrator/a.py", "import mlx.core as mx"),
        ("orchestrator/a.py", "def f():\n    from mlx_lm import load"),
        ("orchestrator/sub/a.py", "__import__('mlx.core')"),
        ("worker/a.py", "from mlx_dp.orchestrator.cli import main"),
        ("kvcache/a.py", "from mlx_dp.worker import engine"),
        ("kvcache/a.py", "from mlx_dp import orchestrator"),
        ("proto/a.py", "from mlx_dp.kvcache.slots import RequestSlots"),
        ("proto/a.py", "import mlx.core"),
        ("worker/a.py", "from . import loop"),
        ("worker/a.py", "from .loop import WorkerLoop"),
        ("worker/a.py", "from ..proto import messages"),
        ("worker/a.py", "from proto.messages import Submit"),
        ("tests/test_a.py", "import worker"),
        ("scripts/a.py", "def f():\n    import kvcache.slots"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "orchestrator/a.py",
            "from mlx_dp.proto.messages import Submit\nimport mlx_dp.orchestrator",
        ),
        ("orchestrator/a.py", "command = [sys.executable, '-m', 'mlx_dp.worker']"),
        ("worker/a.py", "import mlx.core as mx\nfrom mlx_dp.kvcache import slots"),
        ("kvcache/a.py", "from mlx_dp.proto import values\nimport mlx.core as mx"),
        ("proto/a.py", "from google import proto\nimport protobuf, msgspec"),
        ("tests/test_a.py", "from mlx_dp.worker import loop\nfrom mlx_dp.orchestrator import cli"),
    ],
)
def test_what_the_arrows_allow_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("loop", "chain"),
    [
        ("import mlx.core as mx", ["worker/loop.py", "mlx.core"]),
        ("try:\n    import os\nexcept OSError:\n    import mlx_lm", ["worker/loop.py", "mlx_lm"]),
        ("class A:\n    import mlx", ["worker/loop.py", "mlx"]),
        (
            "from mlx_dp.worker import sampling",
            ["worker/loop.py", "worker/sampling.py", "mlx.core"],
        ),
        (
            "from mlx_dp.kvcache.slots import RequestSlots",
            ["worker/loop.py", "kvcache/__init__.py", "kvcache/rows.py", "mlx.core"],
        ),
        ("def f():\n    import mlx.core", None),
        ("if TYPE_CHECKING:\n    from mlx_dp.worker.sampling import sample", None),
        (
            "if typing.TYPE_CHECKING:\n    import os\nelse:\n    import mlx",
            ["worker/loop.py", "mlx"],
        ),
        ("import mlxtend", None),
    ],
)
def test_a_chain_to_the_device_library_is_found(loop: str, chain: list[str] | None) -> None:
    sources = {
        "worker/__init__.py": "",
        "worker/loop.py": loop,
        "worker/sampling.py": "import mlx.core as mx",
        "kvcache/__init__.py": "from mlx_dp.kvcache.rows import Rows",
        "kvcache/rows.py": "from mlx_dp.kvcache import slots\nimport mlx.core as mx",
        "kvcache/slots.py": "import os",
    }
    assert device_chain(sources, "worker/loop.py") == chain
