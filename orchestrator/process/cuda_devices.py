"""CUDA devices, found without the device library, and their assignment to workers."""

import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S: Final = 20.0


def cuda_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of usable devices, in the form of CUDA_VISIBLE_DEVICES; () without CUDA."""
    given = environment.get(_VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    command = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if command is None:
        return ()
    try:
        listing = subprocess.run(
            [command, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())


def device_variables(devices: tuple[str, ...], index: int) -> dict[str, str]:
    """Assign one device to each worker, round robin; {} without devices."""
    if not devices:
        return {}
    return {_VARIABLE: devices[index % len(devices)]}
