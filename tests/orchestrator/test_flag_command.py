"""Values of a flag that come one after another."""

import pytest

from mlx_dp.orchestrator.flag_command import repeated

FLAG = "--name"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("serve --name a", "serve --name a"),
        ("serve --name a b c", "serve --name a --name b --name c"),
        ("serve --name a --name b", "serve --name a --name b"),
        (
            "serve --name a b --port 9 --name c d",
            "serve --name a --name b --port 9 --name c --name d",
        ),
        ("serve --name=a b", "serve --name=a --name b"),
        ("serve --port 9 --host x", "serve --port 9 --host x"),
        ("serve --names a b", "serve --names a b"),
        ("serve --name --port 9", "serve --name --port 9"),
        ("", ""),
    ],
)
def test_a_flag_takes_what_follows_up_to_the_next_one(given: str, read: str) -> None:
    assert repeated(given.split(), FLAG) == read.split()
