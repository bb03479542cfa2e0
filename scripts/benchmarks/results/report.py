"""Tables of medians and ratios, and the machine on which they were measured."""

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import psutil


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile, by nearest rank, so that 1.0 is the largest value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def paired_ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """The median of the ratios within each round, so that a slow spell hits both sides alike."""
    return median([mine / theirs for mine, theirs in zip(ours, peer, strict=True)])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded for reading as plain text."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def column(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(run[name]) for run in runs]


def medians(
    runs: Sequence[Mapping[str, Any]], fields: Mapping[str, Callable[[float], str]]
) -> list[str]:
    """One cell per field: the median over the runs, in the field's format."""
    return [show(median(column(runs, name))) for name, show in fields.items()]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def machine() -> dict[str, Any]:
    """The machine's facts that a reader needs to judge the numbers."""
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "mlx-dp", "uvicorn")},
    }
