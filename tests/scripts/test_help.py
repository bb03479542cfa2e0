"""What people run by hand explains itself."""

import subprocess
import sys

import pytest
from script_modules import SCRIPTS

PROGRAMS = (
    "bench_serve.py",
    "bench_control.py",
    "bench_engine.py",
    "bench_dp_attention.py",
    "soak_engine.py",
    "chaos_run.py",
    "mac_check.py",
    "measure_faults.py",
)


@pytest.mark.system
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_explain_themselves(program: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / program), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
