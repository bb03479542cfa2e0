"""No grammar crashes its checker, however long it compiles or deep it recurses."""

import asyncio
import sys
import time

import pytest

from mlx_dp.orchestrator.text.grammar_check import CHILDREN, GrammarCheck
from mlx_dp.proto.fields import MAX_GRAMMAR_CHARS
from mlx_dp.proto.messages.grammar import Grammar, GrammarKind


def fault(kind: GrammarKind, text: str) -> str | None:
    return asyncio.run(GrammarCheck().fault(Grammar(kind=kind, text=text)))


def test_what_compiles_has_no_fault() -> None:
    assert fault(GrammarKind.REGEX, "[0-9]+") is None
    assert fault(GrammarKind.JSON_SCHEMA, '{"type":"object"}') is None
    assert fault(GrammarKind.LARK, 'start: "a" start | "b"') is None


def test_a_chain_of_rules_that_overflows_the_stack_is_a_fault() -> None:
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(4000))
    found = fault(GrammarKind.LARK, f'start: a0\n{rules}a4000: "x"')
    assert found is not None
    assert "nested too deeply" in found


def test_a_grammar_that_takes_minutes_is_a_fault_in_seconds() -> None:
    terms = " & ".join(f"/.*{i}.*/" for i in range(2000))
    began_at = time.monotonic()
    found = fault(GrammarKind.LARK, f"start: A\nA: {terms}")
    assert found is not None
    assert "too long to compile" in found
    assert time.monotonic() - began_at < 30


@pytest.mark.parametrize("text", ['start: "a" <|im_end|>', 'start: "a" <[5]>'])
def test_tokens_by_name_or_number_are_no_text(text: str) -> None:
    found = fault(GrammarKind.LARK, text)
    assert found is not None
    assert "not text" in found


def test_a_long_complaint_is_cut_to_one_line() -> None:
    found = fault(GrammarKind.LARK, "start: " + "é\x07" * (MAX_GRAMMAR_CHARS // 2 - 10))
    assert found is not None
    assert len(found) < 200
    assert found.isprintable()


def test_each_grammar_is_compiled_once(tmp_path) -> None:
    log = tmp_path / "log"
    script = f"import sys; sys.stdin.read(); open({str(log)!r}, 'a').write('x'); print('no')"
    check = GrammarCheck((sys.executable, "-c", script))

    async def ask() -> list[str | None]:
        grammar = Grammar(kind=GrammarKind.REGEX, text="a")
        return [await check.fault(grammar) for _ in range(3)]

    assert asyncio.run(ask()) == ["no", "no", "no"]
    assert log.read_text() == "x"


def test_a_checker_that_fails_otherwise_is_our_error() -> None:
    check = GrammarCheck((sys.executable, "-c", "raise SystemExit('broken')"))
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(check.fault(Grammar(kind=GrammarKind.REGEX, text="a")))


def test_a_client_that_hangs_up_makes_no_room_for_another_child(tmp_path) -> None:
    gate = tmp_path / "gate"
    script = (
        "import pathlib, sys, time\n"
        "slow = 'slow' in sys.stdin.read()\n"
        f"while slow and not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    )
    check = GrammarCheck((sys.executable, "-c", script))

    async def ask() -> str | None:
        slow = [Grammar(kind=GrammarKind.REGEX, text=f"slow{i}") for i in range(CHILDREN)]
        asked = [asyncio.create_task(check.fault(grammar)) for grammar in slow]
        await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        quick = Grammar(kind=GrammarKind.REGEX, text="quick")
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(check.fault(quick), timeout=0.5)
        finally:
            gate.touch()
        return await check.fault(quick)

    assert asyncio.run(ask()) is None
