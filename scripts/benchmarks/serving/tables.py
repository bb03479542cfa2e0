"""The tables of scripts/bench serve: medians over the rounds, and ratios to the peer."""

from scripts.benchmarks.results.report import (
    column,
    mebibytes,
    median,
    medians,
    milliseconds,
    paired_ratio,
    table,
)
from scripts.benchmarks.serving.scenarios import RUNNING_STREAMS, Measures
from scripts.benchmarks.serving.workload import LONG_PROMPT_TOKENS

Runs = dict[str, list[Measures]]
"""By server, one entry per round."""


def throughput_table(scenario: str, runs: Runs, peer: str) -> str:
    rows = []
    for name, measured in runs.items():
        speed = column(measured, "tokens_per_s")
        rows.append(
            [
                name,
                f"{median(speed):.1f}",
                f"{paired_ratio(speed, column(runs[peer], 'tokens_per_s')):.2f}x",
                *medians(
                    measured,
                    {
                        "ttft_p50_s": milliseconds,
                        "ttft_p99_s": milliseconds,
                        "gap_p50_s": milliseconds,
                        "gap_p99_s": milliseconds,
                        "peak_rss_nbytes": mebibytes,
                    },
                ),
            ]
        )
    headers = ["server", "tokens/s", "ratio", "TTFT p50", "p99", "gap p50", "p99", "peak memory"]
    return f"### {scenario}\n\n{table(headers, rows)}\n"


def long_prompt_table(runs: Runs, peer: str) -> str:
    rows = []
    for name, measured in runs.items():
        ratios = [
            f"{paired_ratio(column(measured, field), column(runs[peer], field)):.2f}x"
            for field in ("gap_p99_s", "gap_max_s")
        ]
        cells = medians(
            measured,
            {"gap_p50_s": milliseconds, "gap_p99_s": milliseconds, "gap_max_s": milliseconds},
        )
        first = milliseconds(median(column(measured, "ttft_s")))
        rows.append([name, *cells, *ratios, first])
    headers = ["server", "gap p50", "p99", "max", "p99 ratio", "max ratio", "its first token"]
    title = f"{LONG_PROMPT_TOKENS}-token prompt arrives at {RUNNING_STREAMS} running streams"
    return f"### {title}\n\n{table(headers, rows)}\n"


def leave_table(runs: Runs) -> str:
    rows = [
        [
            name,
            milliseconds(median(column(measured, "freed_after_s"))),
            f"{median(column(measured, 'freed_after_steps')):.1f}",
        ]
        for name, measured in runs.items()
    ]
    return f"### A client leaves\n\n{table(['server', 'slot free after', 'steps'], rows)}\n"


def same_answers(scenarios: dict[str, Runs], peer: str) -> str:
    """How many greedy responses equal the peer's exactly: a check that the work was the same.

    Spaces before the first word do not count, since mlx-lm drops the first one.
    """
    lines = []
    for name in {name for runs in scenarios.values() for name in runs} - {peer}:
        pairs = [
            (mine, theirs)
            for runs in scenarios.values()
            if "texts" in runs[name][0]
            for ours, others in zip(runs[name], runs[peer], strict=True)
            for mine, theirs in zip(ours["texts"], others["texts"], strict=True)
        ]
        same = sum(mine.lstrip(" ") == theirs.lstrip(" ") for mine, theirs in pairs)
        lines.append(f"{name}: {same} of {len(pairs)} answers equal those of {peer}.")
    return "\n".join(sorted(lines))
