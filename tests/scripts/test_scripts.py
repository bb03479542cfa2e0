"""scripts/serve and scripts/test make .venv, with stubs in place of Python's installers."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.support.hosts.served import wait_until

ROOT: Final = Path(__file__).resolve().parent.parent.parent
INSTALL: Final = (
    "-m pip --disable-pip-version-check --no-input install --quiet"
    " --root-user-action=ignore --no-compile"
)

pytestmark = pytest.mark.system

# Answers questions as the real Python does, records install and run requests, and makes a venv of
# copies of itself. While the file `broken` exists, pip fails; while `slow` does, it starts a child
# and waits for it.
PYTHON_STUB: Final = """#!/usr/bin/env bash
repo={repo}
case "$*" in
    *"-m pip --version"*) exit 0 ;;
    *"-m venv"*)
        echo "$*" >>$repo/log
        rm -rf "${{@: -1}}"
        mkdir -p "${{@: -1}}/bin"
        cp $repo/python3 $repo/mlx-dp "${{@: -1}}/bin"
        mv "${{@: -1}}/bin/python3" "${{@: -1}}/bin/python" ;;
    "-m pip"*)
        echo "$*" >>$repo/log
        seq -f 'pip says %g' 250
        [ ! -e $repo/slow ] || {{ sleep 600 & echo $! >$repo/sleeper; wait; }}
        [ ! -e $repo/broken ] ;;
    *tests/macos/stage.py*) echo "$*"; exit 3 ;;
    "-m pytest"*) echo "$LD_PRELOAD|$OPENBLAS_NUM_THREADS|$*" ;;
    *) exec {python} "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts, with Python and mlx-dp replaced by stubs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "scripts", root / "scripts")
        (root / "pyproject.toml").write_text("[project]\n")
        self.add("python3", PYTHON_STUB.format(repo=root, python=sys.executable))
        self.add("mlx-dp", '#!/usr/bin/env bash\necho "$$ $*"\n')

    def add(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(
        self, *command: str, stderr: int = subprocess.PIPE, **environ: str
    ) -> "subprocess.Popen[str]":
        env = {
            **{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            # A locale that is not installed makes bash complain.
            "LC_ALL": "C",
            "PYTHON": str(self.root / "python3"),
            **environ,
        }
        return subprocess.Popen(
            [str(self.root / "scripts" / command[0]), *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def run(self, *command: str, **environ: str) -> tuple[int, str, str]:
        with self.start(*command, **environ) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def log(self) -> list[str]:
        log = self.root / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    # macOS has its temporary folder behind a link; the scripts see the real one.
    return Checkout(tmp_path.resolve())


def test_the_first_run_installs_and_the_second_does_not(checkout: Checkout) -> None:
    status, out, _ = checkout.run("serve", "--port", "1 2")
    assert status == 0
    assert out.endswith(" serve --port 1 2\n")
    assert checkout.log() == [
        f"-m venv --clear {checkout.root}/.venv",
        f"{INSTALL} --upgrade pip>=25.1",
        f"{INSTALL} --editable {checkout.root}",
    ]
    status, _, err = checkout.run("serve")
    assert (status, err, len(checkout.log())) == (0, "", 3)


def test_serve_becomes_the_server_so_that_signals_reach_it(checkout: Checkout) -> None:
    checkout.run("serve")
    with checkout.start("serve") as process:
        out, _ = process.communicate(timeout=60)
    assert out == f"{process.pid} serve\n"


def test_tests_add_the_development_tools_and_serve_keeps_them(checkout: Checkout) -> None:
    checkout.run("serve")
    checkout.run("test")
    group = f"{INSTALL} --editable {checkout.root} --group {checkout.root}/pyproject.toml:dev"
    assert checkout.log()[-1] == group
    before = len(checkout.log())
    checkout.run("serve")
    assert len(checkout.log()) == before
    (checkout.root / "pyproject.toml").write_text("[project]\n# changed\n")
    checkout.run("serve")
    assert checkout.log()[before:] == [f"{INSTALL} --upgrade pip>=25.1", group]


def test_an_install_cut_short_is_not_regarded_as_good(checkout: Checkout) -> None:
    (checkout.root / "broken").touch()
    status, out, _ = checkout.run("serve")
    assert (status, out) == (1, "")
    (checkout.root / "broken").unlink()
    before = len(checkout.log())
    assert checkout.run("serve")[0] == 0
    assert checkout.log()[before] == f"-m venv --clear {checkout.root}/.venv"


def test_an_install_takes_a_few_lines_and_says_its_size(checkout: Checkout) -> None:
    status, _, err = checkout.run("serve")
    assert status == 0
    assert "pip says" not in err
    assert err.count("\n") == 3
    assert re.search(r"installed mlx-dp into \.venv \(\d+ MB\)\n$", err)


def test_a_terminal_sees_an_install_grow_on_one_line(checkout: Checkout) -> None:
    ours, theirs = os.openpty()
    with checkout.start("serve", stderr=theirs) as process:
        os.close(theirs)
        process.communicate(timeout=60)
    said = os.read(ours, 2**16).decode()
    os.close(ours)
    progress = [line for line in said.split("\n") if "\r" in line and "MB" in line]
    assert len(progress) == 2, said
    assert "0.5 GB" in progress[0]
    assert "pip says" not in said


def test_a_failed_install_ends_with_the_words_of_pip(checkout: Checkout) -> None:
    (checkout.root / "broken").touch()
    status, _, err = checkout.run("serve")
    assert status == 1
    assert "pip says 250\n" in err
    assert "pip says 100\n" not in err
    assert "pip could not install" in err.splitlines()[-1]


@pytest.mark.parametrize("script", ["check", "test"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_scripts_explain_themselves_and_install_nothing(
    checkout: Checkout, script: str, flag: str
) -> None:
    status, out, _ = checkout.run(script, flag)
    assert status == 0
    assert out.startswith(f"Usage: scripts/{script}")
    assert checkout.log() == []


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_install_is_one_line_and_leaves_nothing_running(
    checkout: Checkout, number: signal.Signals, status: int
) -> None:
    (checkout.root / "slow").touch()
    sleeper = checkout.root / "sleeper"
    with checkout.start("serve") as process:
        wait_until(lambda: sleeper.exists() and bool(sleeper.read_text()), "pip is at work")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.splitlines()[-1].startswith("serve: ")
    assert len(err.splitlines()) == 3
    pid = int(sleeper.read_text())
    wait_until(lambda: not psutil.pid_exists(pid), "what pip has started is gone")
    (checkout.root / "slow").unlink()
    before = len(checkout.log())
    assert checkout.run("serve")[0] == 0
    assert checkout.log()[before] == f"-m venv --clear {checkout.root}/.venv"


@pytest.mark.skipif(
    subprocess.run(["env", "--block-signal=INT", "true"], capture_output=True).returncode != 0,
    reason="this env cannot block signals",
)
def test_ctrl_c_waits_for_a_server_that_python_still_starts(checkout: Checkout) -> None:
    checkout.run("serve")
    show = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    (checkout.root / ".venv/bin/mlx-dp").write_text(f"#!{sys.executable}\n{show}\n")
    assert checkout.run("serve")[1] == "True\n"


def test_two_first_runs_at_once_install_once(checkout: Checkout) -> None:
    with checkout.start("serve") as one, checkout.start("serve") as other:
        one.communicate(timeout=60)
        other.communicate(timeout=60)
    assert (one.returncode, other.returncode) == (0, 0)
    assert len(checkout.log()) == 3


def test_slow_tests_run_only_when_asked_for(checkout: Checkout) -> None:
    assert checkout.run("test", "-q", "tests/a b")[1].endswith("-m not slow -q tests/a b\n")
    assert checkout.run("test", "--all", "-q")[1].endswith("|-m pytest -q\n")


def test_a_whole_run_is_parallel_and_arguments_are_passed_to_pytest(
    checkout: Checkout,
) -> None:
    processes = os.sysconf("SC_NPROCESSORS_ONLN") + 1
    parallel = f"-n {processes} --dist worksteal\n"
    assert checkout.run("test")[1].endswith(f"-m pytest -m not slow {parallel}")
    assert " -n " not in checkout.run("test", "-x")[1]
    assert " -n " not in checkout.run("test", "--all", "-x")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS itself has nothing to imitate")
def test_all_tests_end_with_the_imitation_of_macos_and_fail_with_it(checkout: Checkout) -> None:
    status, out, _ = checkout.run("test", "--all")
    assert [line.rpartition("|")[2] for line in out.splitlines()] == [
        f"-m pytest -n {os.sysconf('SC_NPROCESSORS_ONLN') + 1} --dist worksteal",
        "tests/macos/stage.py",
    ]
    assert status == 3
    assert checkout.run("test", "--macos", "-x")[:2] == (3, "tests/macos/stage.py -x\n")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate and preloads nothing")
def test_openblas_is_preloaded_or_its_package_is_named(checkout: Checkout) -> None:
    checkout.run("test")
    _, out, err = checkout.run("test")
    if "libopenblas0-pthread" not in err:
        assert out.startswith("libopenblas.so.0|")
        assert out.split("|")[1].isdigit()
    else:
        assert out.startswith("||")


def test_a_python_that_is_too_old_is_named(checkout: Checkout) -> None:
    checkout.add("old", "#!/bin/sh\nexit 1\n")
    status, out, err = checkout.run("serve", PYTHON=str(checkout.root / "old"))
    assert (status, out) == (1, "")
    assert "not a working Python 3.11 or newer" in err
    assert err.count("\n") == 1


def test_a_missing_ensurepip_is_one_sentence(checkout: Checkout) -> None:
    real = f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    checkout.add("bare", real)
    status, _, err = checkout.run("serve", PYTHON=str(checkout.root / "bare"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert status == 1
    assert f"'sudo apt-get install python{version}-venv'" in err
    assert err.count("\n") == 1
    assert not (checkout.root / ".venv").exists()
