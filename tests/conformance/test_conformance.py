"""In a busy worker, every architecture gives mlx-lm's output for a single request.

One architecture: ``scripts/test tests/conformance -k "[qwen3_next:"``.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.prefix.snapshot_points import SNAPSHOT_INTERVAL
from tests.support.architectures.broken import BROKEN_IN_MLX_LM, CHUNK_DEPENDENT
from tests.support.conformance.model_under_test import ModelUnderTest
from tests.support.conformance.scenario import (
    Ask,
    burst,
    conversation,
    crowd,
    sample,
    short,
    together,
)
from tests.support.conformance.served import Served, Service, serve
from tests.support.conformance.verdicts import Line, Table, least, resumes, verdict
from tests.support.models.oracle import Ties
from tests.support.models.tiny_models import ARCHITECTURES
from tests.support.worker.chosen_forms import ChosenForms

pytestmark = pytest.mark.mlx

CHUNKS = (1, 7, 64, 512)
"""512 holds every prompt whole."""
LONG_CHUNK = 64
"""Holds whole prompts of the architectures whose output changes with the chunks."""
QUICK = Service(chunk=64, prefix_cache=True)
"""The scenario that CI runs: a sample of it for every architecture, all of it for one of each kind.

All others are for scripts/test --all.
"""
UNCACHED = Service(chunk=7, prefix_cache=False)
TRICKLE = Service(chunk=1, prefix_cache=True)
ONE_OF_A_KIND = (
    *("llama", "llama4", "llama_dynamic_rope", "gpt_bigcode", "deepseek_v3"),
    *("gemma2", "gemma3_text", "gemma4_text", "gpt_oss"),
    *("qwen3_next", "falcon_h1", "baichuan_m1", "gear", "mamba", "rwkv7"),
)
"""An architecture for each kind of cache and of batch. CI runs UNCACHED of it whole."""
TRICKLES = frozenset({"llama", "deepseek_v3", "gemma3_text", "qwen3_next", "mamba"})
"""Those whose sample is of TRICKLE in CI, which runs QUICK of them whole."""
QUICK_SCARCE = ("llama", "gemma3_text", "qwen3_next")
"""Those that run one scenario with scarce memory too."""
MAX_TIES = 2
MIN_TOGETHER = 3
"""Rows in a batch at some time, unless prompts trickle in or memory is scarce."""


def scenarios() -> list[object]:
    """All scenarios of an architecture after one another, since they share its model."""
    cases: list[object] = []
    assert set(ONE_OF_A_KIND) <= ARCHITECTURES.keys()
    for name in ARCHITECTURES:
        cases.append(_case(name, TRICKLE if name in TRICKLES else QUICK, sampled=True))
        for chunk, prefix_cache in product(CHUNKS, (True, False)):
            if name in CHUNK_DEPENDENT and chunk < LONG_CHUNK:
                continue
            for scarce in (False, True):
                service = Service(chunk=chunk, prefix_cache=prefix_cache, scarce=scarce)
                cases.append(_case(name, service, sampled=False))
    return cases


def _case(name: str, service: Service, *, sampled: bool) -> object:
    cached = "cache" if service.prefix_cache else "no_cache"
    memory = ":scarce" if service.scarce else ""
    extent = ":sample" if sampled else ""
    quick = sampled or is_quick(name, service)
    return pytest.param(
        name,
        service,
        sampled,
        id=f"{name}:chunk_{service.chunk}:{cached}{memory}{extent}",
        marks=[] if quick else [pytest.mark.slow],
    )


def is_quick(name: str, service: Service) -> bool:
    """Whether the whole scenario runs in CI."""
    if service == replace(QUICK, scarce=True):
        return name in QUICK_SCARCE
    if service == QUICK:
        return name in TRICKLES
    return service == UNCACHED and name in ONE_OF_A_KIND


def asks(name: str, service: Service, *, sampled: bool) -> list[Ask]:
    rng = random.Random(service.chunk)
    if name in CHUNK_DEPENDENT:
        return short(rng)
    if sampled and service.chunk < LONG_CHUNK:
        # So short that its requests meet, although each prompt takes as many steps as tokens.
        return sample(rng, shared=SNAPSHOT_INTERVAL + 2, longest=30)
    if sampled:
        return sample(rng)
    if not service.prefix_cache:
        return crowd(rng)
    return together(burst(rng), crowd(rng), conversation(rng))


def warms_up(name: str, service: Service, *, sampled: bool) -> bool:
    """Whether the start runs the warm-up, which takes longer than the scenario.

    In CI it does once for each kind. The warm-up adds its ways to sample, which are alike for
    all models, and a prompt of 1,100 tokens.
    """
    if sampled:
        return False
    return not is_quick(name, service) or (name in ONE_OF_A_KIND and service == QUICK)


@pytest.mark.parametrize(("name", "service", "sampled"), scenarios())
def test_it_answers_as_alone(
    name: str,
    service: Service,
    sampled: bool,
    under_test: Callable[[str], ModelUnderTest],
    forms: ChosenForms,
    table: Table,
) -> None:
    model = under_test(name)
    line = table.lines.setdefault(name, Line(model.cache_kinds))
    with forms.remembered(name):
        served = serve(
            model.directory,
            asks(name, service, sampled=sampled),
            service,
            warm_up=warms_up(name, service, sampled=sampled),
        )
    line.outcome = f"served {served.form}" if served.form else f"refused: {served.refusal}"
    assert verdict(served.form) >= least(name), line.outcome
    if served.form is not None:
        assert served.form.resumes or not resumes(name), "its prefixes are not cached"
        hold(model, served, service, line)


def hold(model: ModelUnderTest, served: Served, service: Service, line: Line) -> None:
    """Check all outputs and the worker's reports of its memory."""
    assert served.form is not None
    client, ties = served.client, Ties()
    for answer in client.answers:
        model.hold(answer.prompt, answer.ids, ties)
        cached = answer.cached_tokens or 0
        assert cached < len(answer.prompt), answer
        if not service.prefix_cache or not served.form.resumes or answer.ask.salt:
            assert cached == 0, answer
        elif not service.scarce:
            assert cached >= answer.ask.cached, answer
        line.cached_tokens += cached
    assert len(ties.found) <= MAX_TIES, ties.report()
    if service.chunk >= LONG_CHUNK and not service.scarce:
        assert client.most_together >= MIN_TOGETHER
    idle = client.idle
    assert idle is not None
    left = (idle.running, idle.cached_tokens, idle.cached_nbytes, idle.auxiliary_used)
    assert left == (0, 0, 0, 0), idle
    line.scenarios += 1
    line.compared += ties.compared
    line.ties += len(ties.found)
    line.preempted += client.preempted


@pytest.mark.parametrize("name", BROKEN_IN_MLX_LM)
def test_what_mlx_lm_cannot_run_is_in_the_table(name: str, table: Table) -> None:
    broken = BROKEN_IN_MLX_LM[name]
    if not (broken.metal and mx.metal.is_available()):
        table.lines[name] = Line(("-",), outcome=f"broken in mlx-lm: {broken.reason}")
