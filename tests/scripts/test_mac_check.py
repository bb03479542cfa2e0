"""scripts/mac-check measures every part, and its report names no person and no machine."""

import getpass
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.hosts.script_modules import SCRIPTS

pytest.importorskip("mlx.core")

Load = Callable[[str], ModuleType]
OUTPUT = """\
.F..s
FAILED tests/worker/loading/test_device.py::test_it[1] - AssertionError: /Users/somebody/x
1 failed, 3 passed, 1 skipped, 2 deselected in 3.25s
"""


@pytest.mark.slow
@pytest.mark.mlx
def test_a_quick_run_fills_every_part_of_the_report(load: Load, tmp_path: Path) -> None:
    check = load("mac_check.__main__")
    assert check.main(["--quick", "--skip", "tests", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    text = (tmp_path / "report.md").read_text()
    assert [part["name"] for part in report["parts"]] == list(check.PARTS)
    tests, *measured = report["parts"]
    assert tests["skipped"] == "by --only or --skip"
    for part in measured:
        assert part["lines"], part
        assert all(line["value"] and line["good"] for line in part["lines"])
        assert f"## {part['name']}" in text
    assert report["machine"]["mlx"]
    for personal in (str(Path.home()), str(SCRIPTS.parent), str(tmp_path)):
        assert personal not in text


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("taken_s", "in_place", "with_tails"),
    [
        (0.008, ("1.25", "not good"), ("1.25", "-")),
        (0.1, ("0.1", "good"), ("0.1", "-")),
    ],
)
def test_a_copy_of_the_slab_at_each_step_is_not_good(
    taken_s: float,
    in_place: tuple[str, str],
    with_tails: tuple[str, str],
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models, sizes = load("mac_check.models"), load("mac_check.sizes").QUICK
    by_width = {256: 0.010, 512: 0.020}
    monkeypatch.setattr(models, "decode_s", lambda loaded, form, width, steps: by_width[width])
    monkeypatch.setattr(models, "copy_s", lambda nbytes, pieces: taken_s)
    monkeypatch.setattr(models, "copied_share", lambda loaded, form: 0.0)
    lines = models.slab_widths(tmp_path, sizes).lines
    times = [line for line in lines if "extra time with the widest slab" in line.name]
    found = [(line.value, line.verdict.value) for line in times]
    assert found == [in_place, with_tails]


@pytest.mark.mlx
def test_a_failed_part_is_reported_and_the_others_go_on(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    check = load("mac_check.__main__")
    report = load("mac_check.report")

    def broken(folder: Path, sizes: object) -> object:
        raise ValueError(f"[metal::malloc] Resource limit exceeded in {SCRIPTS.parent}/x")

    line = report.judged("it", 2.0, most=1.0, unit=" s", why="it should be quick")
    parts = {"one": broken, "two": lambda folder, sizes: report.Part(name="two", lines=(line,))}
    monkeypatch.setattr(check, "PARTS", parts)
    assert check.main(["--output", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "failed: ValueError: [metal::malloc] Resource limit exceeded in REPOSITORY/x" in text
    assert "| it | 2 s | not good | at most 1 s: it should be quick |" in text


@pytest.mark.mlx
def test_the_tests_are_reported_by_counts_and_names(load: Load) -> None:
    lines = load("mac_check.tests").lines_of(OUTPUT, 1)
    assert [line.value for line in lines] == [
        "1 failed, 3 passed, 1 skipped",
        "tests/worker/loading/test_device.py::test_it[1]",
    ]
    assert {line.verdict.value for line in lines} == {"not good"}


def test_the_report_names_no_person(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = load("mac_check.report")
    monkeypatch.setattr(report.socket, "gethostname", lambda: "annas-studio.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "annaexample")
    monkeypatch.setenv("HOME", "/Users/annaexample")
    said = "in /Users/annaexample/models on annas-studio.local for annaexample"
    assert report.impersonal(said) == "in HOME/models on MACHINE for USER"
