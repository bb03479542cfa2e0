"""The arrows between sub-folders: a table that the imports must follow, without a circle.

A folder's own modules form a room of their own, apart from those of its sub-folders. An import is
allowed inside a room and along the arrows of ``ROOMS``. Imports inside functions and for types
alone count as well. Folders of tests and scripts have no table, but the same bound and no circle.
"""

import graphlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from tests.test_arrows import other_sources, package_sources, source_imports

MOST_MODULES: Final = 14
OURS: Final = ("mlx_dp.", "scripts.", "tests.")

# Each room, and the rooms that it may import. Rooms of the other top-level folders are limited by
# test_arrows.py as well.
TABLE: Final = """
kvcache ->
kvcache/batch -> kvcache proto/messages
kvcache/prefix -> kvcache kvcache/slots proto/capacity
kvcache/slots ->
orchestrator -> proto proto/capacity proto/messages
orchestrator/cli -> orchestrator orchestrator/config orchestrator/control
    orchestrator/control/workers orchestrator/http orchestrator/http/connection orchestrator/model
    orchestrator/process orchestrator/process/remote orchestrator/text orchestrator/text/loading
    proto proto/capacity proto/messages proto/wire
orchestrator/config -> orchestrator orchestrator/control/routing orchestrator/control/workers
    orchestrator/http/access orchestrator/model orchestrator/process orchestrator/process/remote
    orchestrator/text/chat proto proto/capacity proto/messages proto/wire
orchestrator/control -> orchestrator orchestrator/control/requests orchestrator/control/routing
    orchestrator/control/state orchestrator/control/workers proto proto/capacity proto/messages
orchestrator/control/requests -> orchestrator orchestrator/control/routing
    orchestrator/control/state orchestrator/control/workers proto proto/capacity proto/messages
orchestrator/control/routing -> orchestrator/control/state proto
orchestrator/control/state -> orchestrator proto proto/capacity proto/messages
orchestrator/control/workers -> orchestrator orchestrator/control/state proto proto/capacity
    proto/messages proto/wire
orchestrator/formats -> orchestrator/formats/common orchestrator/formats/openai
orchestrator/formats/common -> orchestrator orchestrator/text proto/messages
orchestrator/formats/openai -> orchestrator/formats/common orchestrator/text proto proto/messages
orchestrator/http -> orchestrator orchestrator/formats orchestrator/formats/common
    orchestrator/http/access orchestrator/http/connection orchestrator/http/routes
    orchestrator/text proto/wire
orchestrator/http/access -> proto/wire
orchestrator/http/body -> orchestrator orchestrator/formats/common orchestrator/http/connection
    orchestrator/process
orchestrator/http/connection -> orchestrator orchestrator/formats orchestrator/formats/common
    proto
orchestrator/http/preparation -> orchestrator orchestrator/formats/common orchestrator/http/body
    orchestrator/http/stream orchestrator/text orchestrator/text/chat proto proto/capacity
    proto/messages
orchestrator/http/routes -> orchestrator orchestrator/control/routing orchestrator/formats/common
    orchestrator/http/body orchestrator/http/connection orchestrator/http/preparation
    orchestrator/http/stream orchestrator/text proto/capacity proto/messages
orchestrator/http/stream -> orchestrator orchestrator/formats/common orchestrator/http/connection
    orchestrator/text proto/messages
orchestrator/model -> orchestrator/process proto proto/capacity
orchestrator/process -> orchestrator proto proto/wire
orchestrator/process/remote -> orchestrator orchestrator/process proto proto/capacity
    proto/messages proto/wire
orchestrator/text -> orchestrator orchestrator/process proto/messages
orchestrator/text/chat -> orchestrator/text orchestrator/text/template proto
orchestrator/text/loading -> orchestrator/text orchestrator/text/chat proto proto/messages
orchestrator/text/template ->
proto ->
proto/capacity -> proto
proto/messages -> proto proto/capacity
proto/wire -> proto proto/messages
worker -> kvcache proto proto/capacity proto/messages proto/wire worker/contract worker/engine
    worker/fake worker/gguf worker/loading worker/scheduling worker/shards
worker/contract -> kvcache/prefix proto proto/capacity proto/messages
worker/engine -> kvcache kvcache/batch kvcache/prefix proto proto/capacity proto/messages
    worker/contract worker/grammar worker/loading worker/lockstep worker/sampling
worker/fake -> kvcache/prefix proto/capacity proto/messages worker/contract worker/sampling
worker/gguf -> proto
worker/grammar -> proto/messages worker/contract
worker/loading -> kvcache kvcache/batch proto proto/capacity proto/messages worker/contract
worker/lockstep -> proto proto/messages proto/wire worker/contract worker/loading worker/shards
worker/sampling -> proto/messages worker/contract worker/grammar
worker/scheduling -> kvcache/prefix proto proto/capacity proto/messages worker/contract
worker/shards -> worker/contract worker/loading
"""


def parsed(table: str) -> dict[str, frozenset[str]]:
    """The table's rows; a row goes on in lines that begin with a space."""
    rows = re.sub(r"\n +", " ", table).strip().splitlines()
    pairs = (row.split(" ->") for row in rows)
    return {room.strip(): frozenset(used.split()) for room, used in pairs}


ROOMS: Final = parsed(TABLE)


def room_of(path: str) -> str:
    return path.rpartition("/")[0]


def imported_file(files: Mapping[str, str], name: str) -> str | None:
    """Our file that defines ``name``: a module, or the __init__ of a package."""
    parts = name.removeprefix("mlx_dp.").split(".")
    for depth in range(len(parts), 0, -1):
        prefix = "/".join(parts[:depth])
        for path in (f"{prefix}.py", f"{prefix}/__init__.py"):
            if path in files:
                return path
    return None


def arrows(files: Mapping[str, str]) -> dict[tuple[str, str], set[str]]:
    """The arrows between rooms, each with the files that make it."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for path, source in files.items():
        for name in source_imports(source):
            target = imported_file(files, name) if name.startswith(OURS) else None
            if target is not None and room_of(target) != room_of(path):
                found[room_of(path), room_of(target)].add(path)
    return dict(found)


def table_of(files: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """The table that allows what is imported, and no more."""
    table: defaultdict[str, set[str]] = defaultdict(set)
    for source, target in arrows(files):
        table[source].add(target)
    return {room: frozenset(used) for room, used in table.items()}


def outside_the_table(
    files: Mapping[str, str], table: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    for (source, target), paths in sorted(arrows(files).items()):
        if target not in table.get(source, frozenset()):
            yield f"{source} may not import {target}: {', '.join(sorted(paths))}"


def circle(table: Mapping[str, frozenset[str]]) -> list[str] | None:
    try:
        graphlib.TopologicalSorter(table).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def crowded(paths: Iterator[str] | Mapping[str, str]) -> dict[str, int]:
    modules = Counter(room_of(path) for path in paths if not path.endswith("__init__.py"))
    return {room: count for room, count in modules.items() if count > MOST_MODULES}


def test_imports_between_rooms_follow_the_table() -> None:
    found = list(outside_the_table(package_sources(), ROOMS))
    assert not found, "\n".join(found)


def test_the_table_names_every_room_and_no_arrow_that_is_gone() -> None:
    files = package_sources()
    used = arrows(files)
    assert ROOMS.keys() == {room_of(path) for path in files}
    gone = [
        f"{source} -> {target}"
        for source, targets in ROOMS.items()
        for target in sorted(targets)
        if (source, target) not in used
    ]
    assert not gone, "\n".join(gone)


def test_the_arrows_form_no_circle() -> None:
    assert circle(ROOMS) is None


def test_the_folders_of_tests_and_scripts_form_no_circle() -> None:
    assert circle(table_of(other_sources())) is None


@pytest.mark.parametrize("sources", [package_sources(), other_sources()], ids=["packages", "rest"])
def test_no_folder_has_more_than_fourteen_modules(sources: dict[str, str]) -> None:
    assert crowded(sources) == {}


@pytest.mark.parametrize(
    "source",
    [
        "from mlx_dp.proto.wire.codec import encode",
        "from mlx_dp.proto.wire import codec",
        "import mlx_dp.proto.wire.codec as codec",
        "from mlx_dp.proto.wire import NAME_IN_INIT",
        "def f() -> None:\n    from mlx_dp.proto.wire import codec",
        "if TYPE_CHECKING:\n    from mlx_dp.proto.wire import codec",
    ],
)
def test_a_planted_arrow_is_found(source: str) -> None:
    files = {
        "proto/capacity/a.py": source,
        "proto/wire/__init__.py": "",
        "proto/wire/codec.py": "",
    }
    assert list(outside_the_table(files, {})) == [
        "proto/capacity may not import proto/wire: proto/capacity/a.py"
    ]
    assert not list(outside_the_table(files, {"proto/capacity": frozenset({"proto/wire"})}))


def test_a_planted_circle_is_found() -> None:
    table = {"a": frozenset({"a/b"}), "a/b": frozenset({"a/c"}), "a/c": frozenset({"a"})}
    assert circle(table) is not None
    assert circle(table | {"a/c": frozenset()}) is None


def test_a_planted_circle_of_helpers_is_found() -> None:
    files = {
        "tests/support/a/__init__.py": "",
        "tests/support/a/first.py": "from tests.support.b.second import Second",
        "tests/support/b/second.py": "def f() -> None:\n    from tests.support import a",
        "scripts/c/third.py": "from tests.support.b import second",
    }
    assert table_of(files)["scripts/c"] == {"tests/support/b"}
    assert circle(table_of(files)) is not None
    assert circle(table_of(files | {"tests/support/b/second.py": ""})) is None


@pytest.mark.parametrize("room", ["proto", "scripts/faults", "tests/support/worker"])
def test_a_crowded_folder_is_found(room: str) -> None:
    paths = iter(f"{room}/module_{number}.py" for number in range(MOST_MODULES + 1))
    assert crowded(paths) == {room: MOST_MODULES + 1}
