"""Reads a page of metrics as strictly as the routers that join pages, for tests."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, frozenset[str]]

_OF_ONE_SAMPLE = frozenset({"le", "quantile"})


def label_names(page: str) -> Labels:
    """The label names of each family; its samples have the same ones."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(page):
        assert family.name not in found, f"{family.name} is there twice"
        assert family.samples, f"{family.name} has no sample"
        names = {frozenset(sample.labels) - _OF_ONE_SAMPLE for sample in family.samples}
        assert len(names) == 1, f"{family.name} has samples of {names}"
        (found[family.name],) = names
    typed = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(typed) == len(found), set(typed) ^ found.keys()
    return found


def assert_joinable(pages: Mapping[str, str]) -> None:
    """Assert that families on several pages have the same label names on each of them."""
    joined: dict[str, frozenset[str]] = {}
    for state, page in pages.items():
        for name, names in label_names(page).items():
            assert joined.setdefault(name, names) == names, f"{name} in the state {state!r}"
