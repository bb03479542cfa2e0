"""Every architecture of the installed mlx-lm has a tiny configuration, which mlx-lm itself runs."""

import math
import random

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.utils import load_model

from tests.support.architectures.broken import BROKEN_IN_MLX_LM, CHUNK_DEPENDENT, Broken
from tests.support.models.installed_architectures import installed_architectures
from tests.support.models.oracle import TIE_GAP, SoloAnswer, first_difference, greedy_alone
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.text.tiny_tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.mlx

CHUNKS = (7, 64, 512)
LENGTHS = (23, 90)
"""The shorter one fits in a chunk of 64, and neither in one of 7."""
MAX_TOKENS = 8
MIN_DISTINCT = 6
"""The least number of different tokens in the outputs: a constant token would hide mix-ups."""


@pytest.mark.parametrize("architecture", installed_architectures())
def test_every_installed_architecture_has_a_tiny_configuration(architecture):
    known = {tiny.architecture for tiny in ARCHITECTURES.values()} | BROKEN_IN_MLX_LM.keys()
    assert architecture in known, f"write a tiny configuration of {architecture}"


def test_there_is_no_configuration_of_what_is_not_installed():
    known = {tiny.architecture for tiny in ARCHITECTURES.values()} | BROKEN_IN_MLX_LM.keys()
    assert known <= set(installed_architectures())


# Checks mlx-lm alone on the tiny models. CI runs our engine on each in tests/conformance.
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_mlx_lm_answers_alike_whatever_the_chunk_size(name, tmp_path):
    model, _ = load_model(ARCHITECTURES[name].write(tmp_path))
    rng = random.Random(1)
    alike = []
    seen: set[int] = set()
    for length in LENGTHS:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        answers = [greedy_alone(model, prompt, MAX_TOKENS, chunk=chunk) for chunk in CHUNKS]
        for answer in answers:
            assert all(math.isfinite(gap) for gap in answer.gaps), answer
            seen |= set(answer.ids)
        alike += [equal_or_tied(answer, answers[-1]) for answer in answers]
    assert len(seen) >= MIN_DISTINCT, seen
    assert all(alike) is (name not in CHUNK_DEPENDENT)


def equal_or_tied(answer: SoloAnswer, other: SoloAnswer) -> bool:
    position = first_difference(answer.ids, other)
    return position is None or other.gaps[position] <= TIE_GAP


def run(broken: Broken) -> None:
    greedy_alone(broken.tiny.build(), [5, 9, 70], 2)


@pytest.mark.parametrize("name", BROKEN_IN_MLX_LM)
def test_what_is_broken_in_mlx_lm_still_is(name, capsys):
    broken = BROKEN_IN_MLX_LM[name]
    if broken.metal and mx.metal.is_available():
        run(broken)
        return
    # SystemExit: importing olmo ends the process.
    with pytest.raises((Exception, SystemExit), match=broken.message):
        run(broken)
