"""Every architecture gives the same logits from shards as from whole blocks, or is refused."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from mlx_dp.worker.contract.engine import UnsupportedModelError  # noqa: E402
from mlx_dp.worker.loading.model_measure import weights_nbytes  # noqa: E402
from mlx_dp.worker.shards.sharded_load import shard_model, shard_nbytes  # noqa: E402
from tests.support.architectures.tiny_model import TinyModel  # noqa: E402
from tests.support.models.local_ranks import LocalRanks, logits, relative_error  # noqa: E402
from tests.support.models.tiny_models import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.mlx

PROMPT = [3, 7, 9, 11, 40, 2, 250]
NO_MLP = "no layer has an MLP or experts"
REFUSED = {
    "gemma3n": r"layers\.0\.mlp \(MLP\) is not the sum of its shards",
    "prism_hadamard_qwen35": r"layers\.0\.mlp\.down_proj is a HadamardQuantizedLinear",
    "mamba": NO_MLP,
    "falcon_mamba": NO_MLP,
    "mamba2": NO_MLP,
    "rwkv7": NO_MLP,
}
"""Blocks that are no sum of shards: a norm over the inner width, or an MLP that looks back."""
NO_VOCABULARY = frozenset({"talkie"})
"""It multiplies by the head's weights itself."""
SAMPLE = (
    "llama",
    "phi3",
    "phi3small",
    "starcoder2",
    "qwen",
    "gpt_oss",
    "qwen2_moe",
    "nemotron_h",
    "iquestloopcoder",
    "kimi_k3_residual",
    "longcat_flash",
    "gemma4_text_experts",
    "dbrx",
)
"""Fused in halves and interleaved, with biases, with shared experts, as a mixer, called twice,
with a norm between, with experts that compute nothing, with several arguments, a list of experts.
"""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}


class AloneRunner:
    def run(self, block, rows, shard):
        return shard(rows)


def check_equal(build, size, tolerance=1e-4, vocabulary=False):
    whole = build()
    expected = logits(whole, PROMPT)
    ranks = LocalRanks(build, size, vocabulary=vocabulary)
    assert relative_error(logits(ranks.models[0], PROMPT), expected) <= tolerance
    assert tuple(ranks.calls) == ranks.ranks[0].calls
    check_bytes(whole, ranks, size, vocabulary)
    return ranks


def check_bytes(whole, ranks, size, vocabulary):
    held = tuple(weights_nbytes(model) for model in ranks.models)
    assert held == tuple(rank.kept_nbytes for rank in ranks.ranks)
    assert held == shard_nbytes(whole, size, vocabulary=vocabulary)
    whole_nbytes = weights_nbytes(whole)
    for rank in ranks.ranks:
        assert rank.whole_nbytes == whole_nbytes
        saved = sum(record.nbytes - record.kept_nbytes for record in rank.records)
        assert rank.kept_nbytes == whole_nbytes - saved
    assert max(held) < whole_nbytes


@pytest.mark.parametrize("name", SAMPLE)
def test_shards_of_two_ranks_give_the_logits_of_the_whole(name):
    check_equal(ARCHITECTURES[name].build, 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REFUSED])
def test_every_vocabulary_is_divided_or_refused(name, size):
    if name in NO_VOCABULARY:
        with pytest.raises(UnsupportedModelError, match="leave out --enable-dp-lm-head"):
            LocalRanks(ARCHITECTURES[name].build, size, vocabulary=True)
        return
    check_equal(ARCHITECTURES[name].build, size, vocabulary=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REFUSED])
def test_shards_of_every_architecture_give_the_logits_of_the_whole(name, size):
    ranks = check_equal(ARCHITECTURES[name].build, size)
    records = ranks.ranks[0].records
    print(f"{name}: {len(records)} blocks, the last is {records[-1].name}")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_is_refused_with_the_layer_and_the_way_out(name):
    model = ARCHITECTURES[name].build()
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]) as refusal:
        shard_model(model, rank=0, size=2, runner=AloneRunner())
    assert str(refusal.value).startswith("this model cannot be sharded: ")
    assert str(refusal.value).endswith("leave out --enable-dp-attention")


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma4_text_experts"])
def test_a_divided_vocabulary_gives_the_logits_of_the_whole(name):
    records = check_equal(ARCHITECTURES[name].build, 2, vocabulary=True).ranks[0].records
    assert [record.answers for record in records[-2:]] == [False, True]
    assert records[-2].kept_nbytes == records[-2].nbytes // 2


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_quantized_vocabulary_is_divided_between_its_rows(name):
    def build():
        tiny = ARCHITECTURES[name]
        model = TinyModel(tiny.architecture, {**tiny.extra, **WIDE}).build()
        nn.quantize(model, group_size=32, bits=4)
        return model

    check_equal(build, 3, vocabulary=True)


def test_a_head_that_is_no_layer_cannot_be_divided():
    model = ARCHITECTURES["talkie"].build()
    with pytest.raises(UnsupportedModelError, match=r"0 times a head of the vocabulary.*lm-head"):
        shard_model(model, rank=0, size=2, runner=AloneRunner(), vocabulary=True)


@pytest.mark.parametrize(
    ("name", "group_size", "bits", "mode"),
    [
        ("llama", 64, 4, "affine"),
        ("phi3", 32, 8, "affine"),
        ("qwen3_moe", 32, 4, "affine"),
        ("gpt_oss", 32, 4, "mxfp4"),
        ("llama", 16, 4, "nvfp4"),
        ("llama", 64, 3, "affine"),
    ],
)
def test_quantized_shards_give_the_logits_of_the_whole(name, group_size, bits, mode):
    def build():
        tiny = ARCHITECTURES[name]
        model = TinyModel(tiny.architecture, {**tiny.extra, **WIDE}).build()
        nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
        return model

    check_equal(build, 2)


def test_groups_that_are_too_few_for_the_ranks_are_refused_with_the_widths():
    model = ARCHITECTURES["llama"].build()
    nn.quantize(model, group_size=32, bits=4)
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.layers\.0\.mlp has an inner width of 64, which in units of 32 cannot be "
        "divided among 3 ranks",
    ):
        shard_nbytes(model, 3)


def test_weights_of_zeros_prove_nothing():
    model = ARCHITECTURES["llama"].build()
    down = model.layers[1].mlp.down_proj
    down.weight = mx.zeros_like(down.weight)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp .* proves nothing"):
        shard_model(model, rank=0, size=2, runner=AloneRunner())


def test_half_floats_keep_their_dtype():
    model = ARCHITECTURES["llama"].build()
    model.set_dtype(mx.bfloat16)
    sharded = shard_model(model, rank=1, size=2, runner=AloneRunner())
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.bfloat16}
    assert sharded.records[0].dtype == sharded.records[0].output_dtype == mx.bfloat16
    assert sharded.blocks[0](mx.zeros((2, 3, 32), dtype=mx.bfloat16)).dtype == mx.bfloat16


@dataclass(frozen=True)
class LoadMemory:
    """Bytes of one sharded load in a process of its own."""

    kept: int
    whole: int
    block: int
    peak: int
    active: int


def measure_load(directory: Path) -> LoadMemory:
    before = mx.get_active_memory()
    model, _ = load_model(directory, lazy=True)
    mx.reset_peak_memory()
    sharded = shard_model(model, rank=1, size=2, runner=AloneRunner())
    mx.eval(model.parameters())
    return LoadMemory(
        kept=sharded.kept_nbytes,
        whole=sharded.whole_nbytes,
        block=sharded.records[0].nbytes,
        peak=mx.get_peak_memory() - before,
        active=mx.get_active_memory() - before,
    )


# One block more than needed: MLX's own thread frees used memory, and may be late.
@pytest.mark.parametrize(("dtype", "blocks_beside"), [(mx.float32, 3), (mx.bfloat16, 4)])
def test_loading_never_holds_much_more_than_what_is_kept(tmp_path, dtype, blocks_beside):
    sizes = {"hidden_size": 128, "intermediate_size": 4096, "num_hidden_layers": 10}
    whole = TinyModel("llama", sizes).write(tmp_path)
    weights = {name: a.astype(dtype) for name, a in mx.load(f"{whole}/model.safetensors").items()}
    mx.save_safetensors(f"{whole}/model.safetensors", weights, metadata={"format": "mlx"})
    # A process of its own: arrays of other tests, freed late, would count against this load.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        memory = pool.submit(measure_load, whole).result()
    bound = memory.kept + blocks_beside * memory.block
    assert memory.kept <= memory.peak <= bound < memory.whole
    assert memory.active < memory.kept + 2**20


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_of_a_divided_vocabulary_only_own_rows_stay_in_memory(tmp_path, name):
    tiny = ARCHITECTURES[name]
    whole = TinyModel(tiny.architecture, {**tiny.extra, "vocab_size": 40_000}).write(tmp_path)
    before = mx.get_active_memory()
    model, _ = load_model(whole, lazy=True)
    sharded = shard_model(model, rank=1, size=2, runner=AloneRunner(), vocabulary=True)
    mx.eval(model.parameters())
    assert sharded.kept_nbytes < 0.6 * sharded.whole_nbytes
    assert mx.get_active_memory() - before < sharded.kept_nbytes + 2**18
