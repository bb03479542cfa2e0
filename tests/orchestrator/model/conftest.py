import stat
import sys

import pytest


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Stands in for the interpreter: a shell script that gets its arguments."""

    def install(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return install
