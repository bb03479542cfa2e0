import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.kvcache.common_prefix import common_prefix

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


def test_long_prompts_are_not_compared_token_by_token() -> None:
    left = tuple(range(100_000, 200_000))
    right = (*(int(str(one)) for one in left[:-1]), -1)

    def loop() -> int:
        counted = 0
        for one, other in zip(left, right, strict=True):
            if one != other:
                return counted
            counted += 1
        return counted

    assert loop() == common_prefix(left, right) == 99_999
    assert _fastest(lambda: common_prefix(left, right)) < _fastest(loop)


def _fastest(call) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
