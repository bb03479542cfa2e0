"""From several ranks, every architecture gives mlx-lm's output of one request in one process.

Each rank's clients come, go and cancel at other times, so that ranks are idle while others prefill
and decode. One architecture: ``scripts/test --all tests/conformance/test_ranks.py -k "[qwen3:2"``.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest

pytest.importorskip("mlx.core")

from tests.support.architectures.broken import CHUNK_DEPENDENT
from tests.support.conformance.model_under_test import ModelUnderTest
from tests.support.conformance.rank_report import RankReport
from tests.support.conformance.rank_verdicts import REFUSALS, RankLine, RankTable
from tests.support.conformance.ranks import Ranks
from tests.support.models.oracle import Ties
from tests.support.models.tiny_models import ARCHITECTURES

pytestmark = [pytest.mark.mlx, pytest.mark.system]

QUICK = ("llama", "qwen3_moe", "qwen3_next")
"""In CI: dense, experts, recurrent states."""
QUICK_WARM = ("llama", "qwen3_next")
"""Those that are warmed up as well."""
OF_FOUR = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h")
CHUNK = 64
"""Prompt tokens in a step of one rank."""
MAX_TIES = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Gives living ranks, and keeps them: a group takes a second to form."""
    there: list[Ranks] = []

    def of(size: int) -> Ranks:
        if there and (there[-1].failed or there[-1].size != size):
            there.pop().close()
        if not there:
            there.append(Ranks(size))
        return there[-1]

    yield of
    for each in there:
        each.close()


def cases() -> list[object]:
    two = [_case(name, 2, slow=name not in QUICK) for name in ARCHITECTURES]
    return two + [_case(name, 4, slow=True) for name in OF_FOUR]


def _case(name: str, size: int, *, slow: bool) -> object:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(name, size, id=f"{name}:{size}", marks=marks)


@pytest.mark.parametrize(("name", "size"), cases())
def test_ranks_answer_as_one_process_does(
    name: str,
    size: int,
    ranks: Callable[[int], Ranks],
    under_test: Callable[[str], ModelUnderTest],
    rank_table: RankTable,
) -> None:
    model = under_test(name)
    scenario = "short" if name in CHUNK_DEPENDENT else "mixed"
    reports = ranks(size).serve(
        model.directory,
        scenario=scenario,
        chunk=CHUNK * size,
        warm_up=name not in QUICK or name in QUICK_WARM,
    )
    line = rank_table.lines.setdefault(f"{name} on {size}", RankLine())
    line.refusal = reports[0].refusal
    assert {report.refusal for report in reports} == {line.refusal}
    reason = REFUSALS.get(name)
    assert bool(line.refusal) == (reason is not None), line.refusal
    if reason is not None:
        assert reason in line.refusal
        assert "data-parallel" in line.refusal
        return
    ties = Ties()
    for report in reports:
        for prompt, ids in report.answers:
            model.hold(tuple(prompt), ids, ties)
        assert report.leftovers == [0, 0, 0, 0], report
        assert report.idle_passes < report.passes
    assert len(ties.found) <= MAX_TIES, ties.report()
    assert any(report.idle_passes for report in reports), "no rank was ever idle"
    assert {report.passes for report in reports} == {reports[0].passes}
    line.compared, line.ties = ties.compared, len(ties.found)
    line.blocks, line.passes = reports[0].blocks, reports[0].passes
    hold_memory(model.whole_nbytes, reports, line)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "llama_tied"])
def test_ranks_that_divide_the_vocabulary_too_answer_alike(
    name: str,
    ranks: Callable[[int], Ranks],
    under_test: Callable[[str], ModelUnderTest],
) -> None:
    model = under_test(name)
    serve = ranks(2).serve
    whole, divided = (
        serve(
            model.directory,
            scenario=scenario,
            chunk=2 * CHUNK,
            vocabulary=vocabulary,
            warm_up=False,
        )
        for scenario, vocabulary in (("short", False), ("sample", True))
    )
    ties = Ties()
    for report, beside in zip(divided, whole, strict=True):
        assert not report.refusal
        assert report.held_nbytes == report.told_nbytes < beside.held_nbytes
        for prompt, ids in report.answers:
            model.hold(tuple(prompt), ids, ties)
        assert 0 < report.idle_passes < report.passes
    assert len(ties.found) <= MAX_TIES, ties.report()


def hold_memory(whole: int, reports: Sequence[RankReport], line: RankLine) -> None:
    """Each rank holds all weights outside of blocks, and within them about its share.

    From the arrays of all ranks: those that all have, and the parts of the others, make up the
    whole.
    """
    size = len(reports)
    held = [report.held_nbytes for report in reports]
    assert held == [report.told_nbytes for report in reports]
    common = (sum(held) - whole) // (size - 1)
    cut = whole - common
    outside = {report.held_nbytes - report.block_nbytes for report in reports}
    assert len(outside) == 1 and outside.pop() <= common
    assert common + cut // size <= max(held) + 1 and cut > 0
    for each in held:
        assert abs(each - common - cut / size) <= max(0.1 * cut / size, cut / size / 8), held
    line.whole_nbytes, line.held_nbytes, line.cut_nbytes = whole, max(held), cut
