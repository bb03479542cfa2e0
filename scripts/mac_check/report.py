"""The findings of scripts/mac-check, as markdown and JSON, without names of people or machines."""

import getpass
import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]


class Verdict(Enum):
    GOOD = "good"
    BAD = "not good"
    NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement. ``good`` describes a good value."""

    name: str
    value: str
    good: str
    verdict: Verdict = Verdict.NONE


def judged(name: str, value: float, *, most: float, unit: str = "", why: str) -> Line:
    """A line whose value is good up to ``most``."""
    good = f"at most {most:g}{unit}: {why}"
    verdict = Verdict.GOOD if value <= most else Verdict.BAD
    return Line(name=name, value=f"{value:.4g}{unit}", good=good, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the check: its lines, or the reason for having none."""

    name: str
    lines: tuple[Line, ...] = ()
    skipped: str = ""
    failed: str = ""

    @property
    def sentence(self) -> str:
        """The reason for having no lines; empty when there are lines."""
        if self.failed:
            return f"failed: {self.failed}"
        return f"skipped: {self.skipped}" if self.skipped else ""


def as_markdown(machine: Mapping[str, Any], parts: Sequence[Part]) -> str:
    """The report in markdown."""
    text = ["# mac-check", ""]
    text += [f"- {name}: {value}" for name, value in machine.items()]
    for part in parts:
        text += ["", f"## {part.name}", ""]
        if part.sentence:
            text.append(part.sentence)
            continue
        text += ["| measured | value | verdict | a good value |", "|---|---|---|---|"]
        text += [
            f"| {line.name} | {line.value} | {line.verdict.value} | {line.good} |"
            for line in part.lines
        ]
    return impersonal("\n".join(text) + "\n")


def as_json(machine: Mapping[str, Any], parts: Sequence[Part]) -> str:
    """The report in JSON."""
    body = {"machine": dict(machine), "parts": [asdict(part) for part in parts]}
    return impersonal(json.dumps(body, indent=1, default=lambda value: value.value) + "\n")


def impersonal(text: str) -> str:
    """Replace folders, user and machine by anonymous words."""
    for found, word in (
        (str(ROOT), "REPOSITORY"),
        (str(Path(tempfile.gettempdir()).resolve()), "TEMPORARY"),
        (tempfile.gettempdir(), "TEMPORARY"),
        (str(Path.home()), "HOME"),
        (socket.gethostname(), "MACHINE"),
        (_user(), "USER"),
    ):
        # Shorter names occur inside other words.
        if len(found) > 4:
            text = text.replace(found, word)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A user id without a name.
        return ""
