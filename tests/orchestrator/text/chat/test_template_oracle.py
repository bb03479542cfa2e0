"""Templates render byte for byte as in transformers: constructs, families, random ones."""

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2.defaults
import pytest

from tests.support.text.template_grammar import Grammar
from tests.support.text.template_oracle import ARGUMENTS, CONVERSATIONS, Oracle, as_ours, rendered

TEMPLATES: Final = Path(__file__).parent / "templates"
FAMILIES: Final = sorted(TEMPLATES.glob("*.jinja"))
SAMPLE: Final = 40
WHOLE: Final = 3000


def every_construct() -> Mapping[str, str]:
    """The parts of constructs.txt by their names."""
    text = (TEMPLATES / "constructs.txt").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^=== (.+)\n", text)[1:]
    return {name: source[:-1] for name, source in zip(parts[::2], parts[1::2], strict=True)}


CONSTRUCTS: Final = every_construct()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def cases() -> Iterator[tuple[str, bool, Mapping[str, Any]]]:
    for conversation in CONVERSATIONS:
        for prompt in (True, False):
            for arguments in ARGUMENTS:
                yield conversation, prompt, arguments


CASES: Final = tuple(cases())


def check(oracle: Oracle, source: str, case: tuple[str, bool, Mapping[str, Any]]) -> bool:
    """Compare, and return whether it renders at all."""
    name, prompt, arguments = case
    messages = CONVERSATIONS[name]
    expected = oracle.expected(source, as_ours(source, messages), prompt=prompt, **arguments)
    ours = rendered(source, messages, prompt=prompt, **arguments)
    assert ours == expected, f"{name}, {prompt}, {arguments}: {source}"
    return expected is not None


def test_constructs_are_as_in_transformers(oracle: Oracle) -> None:
    choice = random.Random(1)
    rendering = sum(
        check(oracle, source, case)
        for source in CONSTRUCTS.values()
        for case in choice.sample(CASES, 2)
    )
    assert rendering > len(CONSTRUCTS)


def test_every_filter_and_test_of_jinja2_is_among_the_constructs() -> None:
    named = {name.rsplit(" ", 1)[0] for name in CONSTRUCTS}
    assert jinja2.defaults.DEFAULT_FILTERS.keys() <= named
    assert {f"is {name}" for name in jinja2.defaults.DEFAULT_TESTS} <= named


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_families_are_as_in_transformers(oracle: Oracle, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    rendering = sum(check(oracle, source, case) for case in CASES)
    assert rendering >= len(CASES) // 4


@pytest.mark.parametrize("ten", range(SAMPLE // 10))
def test_random_templates_are_as_in_transformers(oracle: Oracle, ten: int) -> None:
    check_random(oracle, range(10 * ten, 10 * ten + 10))


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(WHOLE // 100))
def test_many_random_templates_are_as_in_transformers(oracle: Oracle, hundred: int) -> None:
    check_random(oracle, range(100 * hundred, 100 * hundred + 100))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_is_as_in_transformers_over_all_conversations(
    oracle: Oracle, name: str
) -> None:
    for case in CASES:
        check(oracle, CONSTRUCTS[name], case)


def check_random(oracle: Oracle, seeds: range) -> None:
    rendering = 0
    for seed in seeds:
        source = Grammar(seed).template()
        rendering += sum(
            check(oracle, source, case) for case in random.Random(seed).sample(CASES, 3)
        )
    assert rendering > len(seeds)
