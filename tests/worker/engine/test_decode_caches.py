"""Every row of a busy batch computes as it would alone, in every form and with every cache."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.batch import attention
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.worker.engine.decode_caches import DecodeCaches
from mlx_dp.worker.engine.prefill import Prefill, PromptChunk
from mlx_dp.worker.loading.batch_check import ALONE
from mlx_dp.worker.loading.loaded_model import inspect
from tests.support.batches.busy_batch import Busy
from tests.support.batches.tiny_batches import KINDS, form_of, loaded_tiny, prefilled, prompt_of
from tests.support.models.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.mlx

SPLIT = BatchForm(split=True)
WITH_TAILS = BatchForm(split=True, tails=True)
ONE_SLAB = BatchForm(split=False)


def forms_of(name: str) -> list[BatchForm]:
    form = form_of(name)
    return [form, replace(form, tails=True), ONE_SLAB, ALONE] if form.split else [form, ALONE]


@pytest.mark.parametrize(
    "name", [*KINDS, "deepseek_v3", "gemma2", "gpt_oss", "mimo_v2_flash", "plamo2", "rwkv7"]
)
def test_rows_compute_as_alone_while_others_join_and_leave(name):
    # One-token prompts have states that are not written yet, or not in their lasting shape.
    for form in forms_of(name):
        rng = random.Random(3)
        busy = Busy(loaded_tiny(name), form)
        for key in range(8):
            busy.set_spare(rng.choice((0, 100_000)))
            length = rng.choice((1, 1, 2, 3, 7, 9, 30))
            busy.join(key, prompt_of(length, key), room=rng.choice((40, 300, 600)))
            for _ in range(rng.randrange(3)):
                busy.step()
            if rng.random() < 0.4:
                busy.leave(rng.choice(sorted(busy.alone)))
            if rng.random() < 0.3:
                busy.caches.compact()
        for key in sorted(busy.alone):
            busy.step()
            busy.leave(key)
        assert (busy.caches.nbytes, busy.caches.used_tokens) == (0, 0)


@pytest.mark.parametrize("form", [SPLIT, WITH_TAILS, ONE_SLAB])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gear"])
def test_rows_that_outgrow_their_room_go_on_as_alone(name, form):
    busy = Busy(loaded_tiny(name), form)
    for key, length in enumerate((255, 9, 254)):
        busy.join(key, prompt_of(length, key))
    grown = [busy.caches.growth_nbytes() for _ in range(4) if busy.step()]
    assert sum(nbytes > 0 for nbytes in grown) == (2 if form.split else 1)


def test_a_long_row_widens_the_one_slab_for_all():
    busy = Busy(loaded_tiny("stablelm"), ONE_SLAB)
    for key in range(3):
        busy.join(key, prompt_of(9, key))
    busy.join(3, prompt_of(9, 3), room=600)
    assert busy.caches.nbytes == 4 * busy.loaded.shape.request_nbytes(1024)
    busy.step()


def test_one_request_takes_the_same_path_as_many():
    busy = Busy(loaded_tiny("qwen3_next"), SPLIT)
    busy.join(5, prompt_of(9))
    assert busy.step() == (5,)
    batch = busy.caches._batch
    assert batch is not None
    assert batch.used_tokens == busy.caches.used_tokens == 9


@dataclass
class Spied:
    """A module that records the shapes of its inputs."""

    module: Any
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, hidden: mx.array, *rest: Any, **named: Any) -> mx.array:
        self.seen.append(hidden.shape)
        return self.module(hidden, *rest, **named)


def test_a_batch_is_one_call_of_its_width_in_every_layer_of_a_hybrid():
    attention.install()
    tiny = ARCHITECTURES["qwen3_next"]
    model = tiny.build()
    # Its queries are twice as wide as its heads, as half of each is a gate.
    recurrent, attends = model.layers[0], model.layers[1].self_attn
    recurrent.linear_attn = states = Spied(recurrent.linear_attn)
    attends.o_proj = outputs = Spied(attends.o_proj)
    busy = Busy(inspect(model, tiny.config), SPLIT)
    widths = []
    for key, length in enumerate((5, 9)):
        busy.join(key, prompt_of(length))
        states.seen.clear()
        outputs.seen.clear()
        busy.caches.forward(busy.newest, [])
        widths.append((states.seen, outputs.seen))
        states.seen, outputs.seen = [], []
    heads, dim = tiny.config["num_attention_heads"], tiny.config["head_dim"]
    assert widths == [
        ([(rows, 1, tiny.config["hidden_size"])], [(rows, 1, heads * dim)]) for rows in (1, 2)
    ]


def test_a_row_joins_the_batch_once_its_state_is_in_shape():
    # longcat_flash_ngram remembers two tokens.
    busy = Busy(loaded_tiny("longcat_flash_ngram"), ONE_SLAB)
    busy.join(0, prompt_of(1))
    busy.join(1, prompt_of(20))
    busy.join(2, prompt_of(2))
    batched = [(busy.step(), sorted(busy.caches._in_batch)) for _ in range(4)]
    # Unbatched rows come after the batch; in one slab rows lie as they joined.
    assert batched == [
        ((1, 0, 2), [1]),
        ((1, 2, 0), [1, 2]),
        ((1, 2, 0), [0, 1, 2]),
        ((1, 2, 0), [0, 1, 2]),
    ]
    assert busy.caches._unbatched.nbytes == 0


@pytest.mark.parametrize("form", [SPLIT, WITH_TAILS])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_chunks_are_mixed_into_the_decode_and_share_passes(name, form):
    loaded = loaded_tiny(name)
    busy = Busy(loaded, form)
    assert busy.caches.mixes_chunks
    prompts = {10: prompt_of(30, 1), 11: prompt_of(12, 2), 12: prompt_of(2, 3)}
    prefills = {key: Prefill(loaded, prompt) for key, prompt in prompts.items()}

    def take(**sizes: int) -> list[PromptChunk]:
        taken = [PromptChunk.cut_from(prefills[int(key[1:])], size) for key, size in sizes.items()]
        return [chunk for chunk in taken if chunk is not None]

    busy.caches.run_chunks(take(k10=5, k11=1))
    busy.join(0, prompt_of(9))
    busy.join(1, prompt_of(3, 4), room=600)
    busy.step(take(k10=1, k11=7))
    busy.step(take(k10=10))
    busy.caches.run_chunks(take(k10=14, k11=4, k12=2))
    for key, prompt in prompts.items():
        assert prefills[key].complete
        busy.join_prefilled(key, prefills[key], prompt, room=40)
    busy.step()
    busy.step()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "falcon_h1"])
def test_models_with_states_mix_no_chunks(name):
    assert not DecodeCaches(loaded_tiny(name), SPLIT).mixes_chunks


def test_a_chunk_of_which_only_the_last_token_is_left_is_none():
    prefill = prefilled(loaded_tiny("llama"), prompt_of(9), chunks=(8,))
    assert prefill.complete
    begun = Prefill(loaded_tiny("llama"), prompt_of(9))
    begun.run(8)
    assert PromptChunk.cut_from(begun, 1) is None
    assert begun.complete


@pytest.mark.parametrize("name", KINDS)
def test_what_is_copied_out_of_a_row_is_what_its_prompt_would_have_left(name):
    loaded = loaded_tiny(name)
    for form in forms_of(name):
        busy = Busy(loaded, form)
        for key, length in ((0, 30), (1, 9)):
            busy.join(key, prompt_of(length, key))
        for _ in range(4):
            busy.step()
        # The last token of these is the next to be fed.
        expected = prefilled(loaded, busy.alone[1].tokens).content()
        assert expected is not None
        assert expected.length == 12
        found = busy.caches.saved_kv(1, Save(1, 2, 11))
        snapshot = busy.caches.snapshot(1)
        assert snapshot is not None
        assert snapshot.position == 12
        pairs = [
            (a, b)
            for ours, kv in zip(found, expected.kv, strict=True)
            for a, b in zip(ours, kv.tokens(2, 11), strict=True)
        ]
        pairs += zip(snapshot.arrays(), expected.recent.arrays(), strict=True)
        for ours, theirs in pairs:
            atol = 1e-4 * max(1.0, float(mx.abs(theirs).max()))
            np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=atol)


def test_a_state_that_is_not_there_yet_is_not_kept():
    busy = Busy(loaded_tiny("qwen3_next"), SPLIT)
    busy.join(0, prompt_of(1))
    assert busy.caches.snapshot(0) is None
