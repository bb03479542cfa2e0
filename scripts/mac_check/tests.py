"""The tests that run MLX kernels, as a part of scripts/mac-check."""

import re
import subprocess
import sys
from pathlib import Path

from scripts.mac_check.report import ROOT, Line, Part, Verdict
from scripts.mac_check.sizes import Sizes


def run_tests(_: Path, sizes: Sizes) -> Part:
    """Run the chosen tests. The whole output stays on this machine, in tests.log."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "mlx"]
    command += ["tests"] if sizes.all_tests else sizes.tests
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (sizes.output / "tests.log").write_text(done.stdout + done.stderr)
    return Part(name="tests", lines=lines_of(done.stdout, done.returncode))


def lines_of(output: str, status: int) -> tuple[Line, ...]:
    """Pytest's final counts, and the names of the failed tests."""
    ended = output.strip().rpartition("\n")[2]
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", ended))
    whole = Line(
        name="tests that run MLX kernels",
        value=counts or f"none ran, status {status}",
        good="none failed; skipped tests need the demo model, or another system",
        verdict=Verdict.BAD if status else Verdict.GOOD,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    named = (
        Line(name="failed", value=name, good="see tests.log", verdict=Verdict.BAD)
        for name in failed
    )
    return (whole, *named)
