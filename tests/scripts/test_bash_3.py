"""The shell scripts keep to bash 3.2, the newest version on macOS."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NEWER = {
    "mapfile and readarray (4.0)": r"\b(mapfile|readarray)\b",
    "associative and global variables (4.0, 4.2)": r"\b(declare|local|typeset|readonly) +-\w*[Ag]",
    "references to names (4.3)": r"\b(declare|local|typeset) +-\w*n\b",
    "changes of case (4.0)": r"\$\{\w+(\[[^]]*\])?(,|\^)",
    "transformations (4.4)": r"\$\{[\w@*]+(\[[^]]*\])?@\w\}",
    "&>> (4.0)": r"&>>",
    "|& (4.0)": r"\|&",
    ";& and ;;& (4.0)": r";;?&",
    "coproc (4.0)": r"\bcoproc\b",
    "[[ -v (4.2)": r"\[\[?\s+(!\s+)?-v\s",
    "printf of times (4.2)": r"printf\b.*%\([^)]*\)T",
    "negative indices (4.3)": r"\$\{\w+\[-\d+\]\}",
    "negative lengths (4.2)": r"\$\{\w+:[^}]*:\s*-\d",
    "wait -n (4.3)": r"\bwait +-n\b",
    "globstar and its kin (4.0)": r"\bshopt\b.*\b(globstar|lastpipe|inherit_errexit)\b",
    "variables of newer shells": r"\$\{?(BASHPID|EPOCHSECONDS|EPOCHREALTIME|SRANDOM)\b",
    "{1..9..2} (4.0)": r"\{\w+\.\.\w+\.\.\w+\}",
    "\\u in strings (4.2)": r"\$'[^']*\\[uU]",
    "numbered descriptors by name (4.1)": r"\{\w+\}[<>]",
}


def scripts() -> list[Path]:
    """All scripts that people run; .ci/run is for Debian only."""
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    return [path for path in files if path.suffix == "" and "bash" in first_lines(path)]


def first_lines(path: Path) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[:3])


def code_of(text: str) -> str:
    """The script without whole-line comments."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def complaints(text: str) -> list[str]:
    """Everything that bash 3.2 would not understand, or would stop at."""
    code = code_of(text)
    found = [what for what, pattern in NEWER.items() if re.search(pattern, code)]
    guarded = re.sub(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\]\}"\}', "", code)
    for name in sorted(set(re.findall(r"\$\{(\w+)\[[@*]\]\}", guarded))):
        # Under set -u, 3.2 takes an array without elements for a variable that is not set.
        if re.search(rf"(?m)(^|\s){name}=\(\s*\)", code):
            found.append(f'{name} may be empty: ${{{name}[@]+"${{{name}[@]}}"}}')
    return found


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_nothing_in_a_script_is_newer_than_bash_3(path: Path) -> None:
    assert complaints(path.read_text()) == []


def test_the_scripts_that_people_run_are_looked_at() -> None:
    names = {path.name for path in scripts()}
    assert {"serve", "test", "check", "chaos", "mac-check", "setup-venv"} <= names


@pytest.mark.parametrize(
    "line",
    [
        "mapfile -t lines <file",
        "declare -A seen",
        "local -n other=$1",
        'echo "${name,,}"',
        'echo "${name^}"',
        'echo "${list[@]@Q}"',
        "run &>>log",
        "run |& tee log",
        "a) one ;;&",
        "if [[ -v HOME ]]; then",
        "printf '%(%F)T' -1",
        'echo "${list[-1]}"',
        'echo "${name:0:-1}"',
        "wait -n",
        "shopt -s globstar",
        'echo "$EPOCHSECONDS"',
        "for i in {1..9..2}; do",
        "exec {log}>file",
        'list=()\nrun "${list[@]}"',
    ],
)
def test_what_is_newer_is_found(line: str) -> None:
    assert complaints(f"#!/usr/bin/env bash\n{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "# mapfile is missing on macOS",
        'list=()\nrun ${list[@]+"${list[@]}"}',
        'list=(one)\nrun "${list[@]}" "${list[@]:1}"',
        'echo "${name:-none}" "${name%%.*}" "${#list[@]}" >log 2>&1',
        "a) one ;;",
    ],
)
def test_what_bash_3_knows_is_not(line: str) -> None:
    assert complaints(f"#!/usr/bin/env bash\n{line}\n") == []
