"""The RAM that may be used, in and out of a container."""

from pathlib import Path

import psutil

from mlx_dp.orchestrator.config.memory_share import ram_nbytes


def test_a_container_limit_bounds_the_ram(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert ram_nbytes((limit,)) == 1_000_000


def test_no_limit_means_the_whole_machine(tmp_path: Path) -> None:
    unlimited = tmp_path / "memory.max"
    unlimited.write_text("max\n")
    absurd = tmp_path / "memory.limit_in_bytes"
    absurd.write_text(f"{2**63 - 4096}\n")
    total = psutil.virtual_memory().total
    assert ram_nbytes((unlimited, absurd, tmp_path / "missing")) == total
