"""The oracle accepts equal answers, counts ties, and refuses everything else."""

from dataclasses import replace

import pytest

from tests.support.models.oracle import SoloAnswer, Ties, assert_greedy, assert_same, greedy_alone
from tests.support.models.tiny_models import DENSE, TINY_MODELS

ANSWER = SoloAnswer(ids=(7, 8, 9), runners_up=(1, 2, 3), gaps=(0.5, 2e-5, 0.5), stopped=False)


def test_equal_answers_have_no_tie():
    ties = Ties()
    assert assert_same([7, 8, 9], ANSWER, ties) is None
    assert (ties.compared, ties.found) == (3, [])


def test_the_second_best_within_float_error_is_a_tie_and_is_reported_with_its_gap():
    ties = Ties()
    assert assert_same([7, 2, 5], ANSWER, ties, offset=10) == 1
    assert ties.report() == ("1 ties in 2 positions\n  position 11: gap 2.00e-05, ours 2, oracle 8")


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param([1, 8, 9], id="second best but far behind"),
        pytest.param([7, 3, 9], id="at a tie but neither of the two"),
        pytest.param([7, 8], id="too short"),
        pytest.param([7, 8, 9, 9], id="too long"),
    ],
)
def test_any_other_difference_fails(ours):
    with pytest.raises(AssertionError):
        assert_same(ours, ANSWER, Ties())


@pytest.mark.mlx
def test_an_answer_is_followed_behind_a_tie():
    model, prompt = DENSE["llama"].build(), [5, 9, 70]
    alone = greedy_alone(model, prompt, 8)
    swapped = [*alone.ids[:3], alone.runners_up[3]]
    rest = greedy_alone(model, [*prompt, *swapped], 4)
    ties = Ties()
    assert_greedy(model, prompt, [*swapped, *rest.ids], max_tokens=8, ties=ties, tie_gap=100.0)
    assert [(tie.position, tie.ours) for tie in ties.found] == [(3, alone.runners_up[3])]
    wrong = [*swapped, *rest.ids[:-1], rest.ids[-1] + 1]
    with pytest.raises(AssertionError):
        assert_greedy(model, prompt, wrong, max_tokens=8, ties=Ties(), tie_gap=alone.gaps[3])


@pytest.mark.mlx
def test_an_answer_ends_with_its_stop_token():
    model, prompt = DENSE["llama"].build(), [5, 9, 70]
    free = greedy_alone(model, prompt, 8)
    stopped = greedy_alone(model, prompt, 8, stop_ids={free.ids[4]})
    assert stopped.stopped
    assert stopped.ids == free.ids[:5]
    assert_greedy(model, prompt, stopped.ids, max_tokens=8, ties=Ties(), stop_ids={free.ids[4]})
    with pytest.raises(AssertionError):
        assert_same(free.ids, replace(stopped), Ties())


@pytest.mark.mlx
@pytest.mark.parametrize("name", TINY_MODELS)
def test_answers_of_tiny_models_depend_on_the_whole_prompt(name):
    model = TINY_MODELS[name].build()
    one = greedy_alone(model, [5, 9, 70, 33, 100], 24, chunk=2)
    other = greedy_alone(model, [6, 9, 70, 33, 100], 24, chunk=2)
    assert one.ids != other.ids
    assert len(set(one.ids)) > 3
    assert_greedy(
        model, [5, 9, 70, 33, 100], one.ids, max_tokens=24, ties=(ties := Ties()), chunk=512
    )
    assert not ties.found, ties.report()
