"""Models whose states ignore padding are found by running two passes; the reason is reported."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch.padded_step import PaddedStep
from mlx_dp.worker.loading.padding_check import keeps_padding_out
from tests.support.batches.tiny_batches import loaded_tiny

pytestmark = pytest.mark.mlx

KEEP_IT_OUT = ("gear", "granitemoehybrid", "lfm2", "mamba2", "falcon_h1", "qwen3_5_moe")
TAKE_IT_IN = ("bailing_moe_linear", "jamba", "mamba", "rwkv7", "recurrent_gemma", "baichuan_m1")


@pytest.mark.parametrize("name", KEEP_IT_OUT)
def test_models_that_heed_lengths_may_be_padded(name):
    assert keeps_padding_out(loaded_tiny(name))


@pytest.mark.parametrize("name", TAKE_IT_IN)
def test_models_that_do_not_heed_lengths_are_found(name, caplog):
    with caplog.at_level(logging.INFO):
        assert not keeps_padding_out(loaded_tiny(name))
    assert "since padding changes logits by" in caplog.text


def test_a_state_of_the_wrong_time_is_found_though_no_padding_reaches_it():
    # It takes the convolution window by the lengths, and the state without them.
    assert not keeps_padding_out(loaded_tiny("nemotron_h"))


@dataclass
class Leaky:
    """A model into whose states a little of the padding of wider passes leaks."""

    model: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        last = 1e-6 * tokens[:, -1:].astype(mx.float32)
        for state in cache if len(tokens) > 1 else ():
            state.cache = [
                array + last.reshape(-1, *([1] * (array.ndim - 1))) for array in state.cache
            ]
        return logits


def test_padding_that_moves_a_state_by_less_than_rounding_is_found(caplog):
    loaded = loaded_tiny("mamba2")
    with caplog.at_level(logging.INFO):
        assert not keeps_padding_out(replace(loaded, model=Leaky(loaded.model)))
    assert "since padding changes logits by" in caplog.text


def test_attention_that_goes_wrong_in_a_padded_pass_is_found(monkeypatch):
    attend = PaddedStep.attend

    def shifted(step: PaddedStep, queries: mx.array, parts: Any, **named: Any) -> mx.array:
        return mx.roll(attend(step, queries, parts, **named), 1, axis=0)

    monkeypatch.setattr(PaddedStep, "attend", shifted)
    assert not keeps_padding_out(loaded_tiny("falcon_h1"))


def test_what_a_model_raises_on_padded_rows_is_the_reason(monkeypatch, caplog):
    def refuse(*arguments: Any) -> None:
        raise TypeError("one row only")

    monkeypatch.setattr(PaddedStep, "write", refuse)
    with caplog.at_level(logging.INFO):
        assert not keeps_padding_out(loaded_tiny("qwen3_next"))
    assert "short prompts run alone: TypeError: one row only" in caplog.text


def test_memory_that_runs_out_says_nothing_about_padding(monkeypatch):
    def exhaust(*arguments: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(PaddedStep, "write", exhaust)
    with pytest.raises(MemoryError):
        keeps_padding_out(loaded_tiny("qwen3_next"))
