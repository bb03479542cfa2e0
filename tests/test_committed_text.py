"""Committed files name no path of a machine they were written on."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

# Assembled, so that this file does not contain them either.
MACHINE_PATH: Final = re.compile(rf"(?<![\w.~-])/(?:{'|'.join(('work', 'root'))})/")


def committed_files() -> list[Path]:
    # The tests may run as another user than the owner of the checkout: root, in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    # A file may be deleted and not yet committed.
    return [path for name in listed.stdout.split("\0") if (path := ROOT / name).is_file()]


def test_no_committed_text_names_a_machine_path() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in committed_files()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root"])
def test_a_planted_machine_path_is_found(folder: str) -> None:
    assert MACHINE_PATH.search(f"open('/{folder}/main/x')")
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/main or ./{folder}/main")
