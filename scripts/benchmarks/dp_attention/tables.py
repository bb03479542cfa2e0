"""The tables of scripts/bench dp-attention: medians over rounds, and ratios to the other modes."""

from collections.abc import Mapping, Sequence

from scripts.benchmarks.dp_attention.modes import ONE, RANKS, REPLICAS
from scripts.benchmarks.results.cases import Goal, fine_milliseconds
from scripts.benchmarks.results.report import (
    column,
    mebibytes,
    median,
    medians,
    milliseconds,
    paired_ratio,
    table,
)
from scripts.benchmarks.serving.scenarios import Measures

MOE_WEIGHTS = Goal(at_most=0.6)
"""The goal, to two replicas, for a model whose experts are nine tenths of its weights."""

Runs = Mapping[str, Sequence[Measures]]
"""By server, one entry per round."""


def weights_table(
    weights: Mapping[str, Sequence[int]],
    resident: Mapping[str, Sequence[int]],
    goal: Goal | None = None,
) -> str:
    """Weights are the arrays that workers report, resident memory is the system's count."""
    whole = sum(weights[REPLICAS])
    rows = []
    for name, held in weights.items():
        ratio = sum(held) / whole
        rows.append(
            [
                name,
                " + ".join(mebibytes(nbytes) for nbytes in held),
                mebibytes(sum(held)),
                f"{ratio:.3f}x",
                goal.judge(ratio) if goal is not None and name == RANKS else "",
                " + ".join(mebibytes(nbytes) for nbytes in resident[name]),
            ]
        )
    headers = ["server", "weights", "in all", f"to {REPLICAS}", "goal", "resident"]
    return f"### Weights\n\n{table(headers, rows)}\n"


def speed_table(level: str, runs: Runs) -> str:
    rows = []
    for name, measured in runs.items():
        speed = column(measured, "tokens_per_s")
        ratios = [
            f"{paired_ratio(speed, column(runs[other], 'tokens_per_s')):.2f}x"
            for other in (ONE, REPLICAS)
        ]
        cells = medians(
            measured,
            {
                "ttft_p50_s": milliseconds,
                "ttft_p99_s": milliseconds,
                "gap_p50_s": milliseconds,
                "gap_p99_s": milliseconds,
                "cpu_s_per_token": fine_milliseconds,
            },
        )
        rows.append([name, f"{median(speed):.1f}", *ratios, *cells])
    headers = ["server", "tokens/s", f"to {ONE}", f"to {REPLICAS}"]
    headers += ["TTFT p50", "p99", "gap p50", "p99", "CPU a token"]
    return f"### {level}\n\n{table(headers, rows)}\n"


def passes_table(by_level: Mapping[str, Sequence[Measures]]) -> str:
    """Counters of the ranks: passes, those without rows of their own, and waits in them."""
    rows = []
    for level, measured in by_level.items():
        ranks = sorted({key.rpartition(" ")[2] for run in measured for key in run["counts"]})
        for rank in ranks:
            passes, idle, waited, tokens = (
                [run["counts"].get(f"{name} {rank}", 0.0) for run in measured]
                for name in ("passes", "idle_passes", "peer_wait_seconds", "generation_tokens")
            )
            shares = [part / max(1.0, whole) for part, whole in zip(idle, passes, strict=True)]
            waits = [part / max(1.0, whole) for part, whole in zip(waited, passes, strict=True)]
            rows.append(
                [
                    level if rank == ranks[0] else "",
                    rank,
                    f"{median(tokens):.0f}",
                    f"{median(passes):.0f}",
                    f"{median(shares):.0%}",
                    fine_milliseconds(median(waits)),
                ]
            )
    headers = ["", "rank", "tokens", "passes", "of them idle", "wait a pass"]
    return f"### Passes of the ranks\n\n{table(headers, rows)}\n"


def kill_table(runs: Runs) -> str:
    rows = [
        [
            name,
            milliseconds(median(column(measured, "next_token_s"))),
            milliseconds(median(column(measured, "others_gap_s"))),
            milliseconds(median(column(measured, "healed_s"))),
        ]
        for name, measured in runs.items()
    ]
    headers = ["server", "next token of its streams", "longest gap of others", "all serve again"]
    return f"### SIGKILL of a worker with streams\n\n{table(headers, rows)}\n"
