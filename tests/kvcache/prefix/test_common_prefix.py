import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.kvcache.prefix.common_prefix import common_prefix

IDS = st.lists(st.integers(0, 2)).map(tuple)


@given(left=IDS, right=IDS, start=st.integers(0, 12))
def test_ids_are_counted_up_to_the_first_that_differs(
    left: tuple[int, ...], right: tuple[int, ...], start: int
) -> None:
    counted = 0
    for one, other in zip(left, right[start:], strict=False):
        if one != other:
            break
        counted += 1
    assert common_prefix(left, right, start) == counted


@pytest.mark.parametrize("differing", [0, 1, 63, 64, 29_999])
def test_one_difference_is_found_anywhere_in_a_long_prompt(differing: int) -> None:
    left = tuple(range(30_000))
    right = (*left[:differing], -1, *left[differing + 1 :])
    assert common_prefix(left, right) == differing


class Counted(tuple[int, ...]):
    """Counts the reads of its items."""

    looks = 0

    def __getitem__(self, place):
        self.looks += 1
        return super().__getitem__(place)


def test_long_prompts_are_looked_into_a_few_times_and_not_token_by_token() -> None:
    prompt = Counted(range(100_000))
    assert common_prefix((*range(99_999), -1), prompt) == 99_999
    assert prompt.looks < 30
