import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.errors import ConfigError

mx = pytest.importorskip("mlx.core")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mlx_dp.worker.gguf.file import GgufFile  # noqa: E402
from mlx_dp.worker.gguf.tokenizer import (  # noqa: E402
    build_tokenizer,
    end_token_ids,
    write_tokenizer,
)

pytestmark = pytest.mark.mlx

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
# These eight bytes have no token in SmolLM2's vocabulary: four rare control characters, and the
# first bytes of code points from U+40000 to U+BFFFF, where Unicode has no character.
DEMO_GAPS = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}

SPECIAL_TEXT = st.sampled_from(
    [
        *CONTROL_TOKENS,
        "<|im_",
        "|>",
        "e\u0301",
        "👩‍👩‍👧‍👦",
        "🇫🇷",
        "\x00",
        "\x7f",
        "\u200b",
        "  ",
        "\r\n",
        "½٣",
    ]
)
ANY_TEXT = st.lists(SPECIAL_TEXT | st.text(max_size=12), max_size=8).map("".join)


def tokenizer_of(**changes) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    }
    return build_tokenizer(GgufFile({}, metadata | changes))


SPLITTERS = {pre: tokenizer_of(**{"tokenizer.ggml.pre": pre}) for pre in ("smollm", "gpt-2")}
SPLITTERS["llama-bpe"] = tokenizer_of(**{"tokenizer.ggml.pre": "llama-bpe"})


@pytest.mark.parametrize("pre", SPLITTERS)
@given(text=ANY_TEXT)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_exactly(pre, text):
    tokenizer = SPLITTERS[pre]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_merges_join_and_digits_stand_alone():
    tokenizer = SPLITTERS["smollm"]
    tokens = tokenizer.encode("the the 12", add_special_tokens=False).tokens
    assert tokens == ["t", "he", "Ġthe", "Ġ", "1", "2"]


def test_special_tokens_keep_their_ids():
    tokenizer = SPLITTERS["smollm"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [
        1,
        tokenizer.token_to_id("a"),
        2,
    ]
    assert tokenizer.get_vocab_size() == 3 + 256 + 3


def test_a_user_defined_token_is_matched_whole_and_not_special():
    changes = {
        "tokenizer.ggml.tokens": [*TOKENS, "<tool>"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3) + [4],
    }
    tokenizer = tokenizer_of(**changes)
    ids = tokenizer.encode("x<tool><|im_end|>", add_special_tokens=False).ids
    assert ids[1:] == [len(TOKENS), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool>"


def test_the_start_token_is_added_only_where_the_file_says_so():
    start = {"tokenizer.ggml.bos_token_id": 1}
    assert tokenizer_of(**start).encode("a").ids[0] != 1
    assert tokenizer_of(**start, **{"tokenizer.ggml.add_bos_token": True}).encode("a").ids[0] == 1


def test_every_end_token_is_known_once():
    keys = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0}
    assert end_token_ids(GgufFile({}, keys)) == [2, 0]
    assert end_token_ids(GgufFile({}, keys | {"tokenizer.ggml.eot_token_id": 2})) == [2]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pre", "tekken", "pre is 'tekken'"),
        ("pre", "default", "pre is 'default'"),
        ("model", "bert", "'bert' tokenizer"),
        ("tokens", ["a", "a"], "2 tokens but only 1"),
        ("merges", ["a"], "broken BPE merge: 'a'"),
        ("merges", ["a b c"], "broken BPE merge"),
        ("merges", ["a ??"], "merge of unknown tokens: 'a \\?\\?'"),
        ("token_type", [3], rf"{len(TOKENS)} tokens but 1 token types"),
    ],
)
def test_what_would_tokenize_wrongly_is_refused(key, value, words):
    with pytest.raises(ConfigError, match=words):
        tokenizer_of(**{f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("key", ["bos", "eos", "unknown", "padding"])
@pytest.mark.parametrize("index", [-1, len(TOKENS), 2**32 - 1])
def test_a_role_of_a_token_that_is_not_there_is_refused(key, index, tmp_path, make_gguf):
    gguf = make_gguf()
    changes = {
        f"tokenizer.ggml.{key}_token_id": index,
        "tokenizer.ggml.add_bos_token": True,
    }
    with pytest.raises(ConfigError, match=rf"{key}_token_id is {index}, but it has \d+ tokens"):
        write_tokenizer(GgufFile({}, gguf.metadata | changes), tmp_path)


def test_transformers_loads_the_files_unchanged(tmp_path, make_gguf):
    tiny = make_gguf()
    write_tokenizer(GgufFile(tiny.arrays, tiny.metadata), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = " the 12 <|im_end|>é"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert loaded.encode(text) == expected
    assert loaded.decode(expected) == text
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert (loaded.pad_token_id, loaded.unk_token_id) == (2, 0)
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
    ],
)
def test_the_demo_model_gives_the_published_ids(demo_model_dir, text, ids):
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.model
def test_the_demo_model_brings_back_all_text_that_its_vocabulary_can_hold(demo_model_dir):
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))

    @given(text=ANY_TEXT.filter(lambda text: DEMO_GAPS.isdisjoint(text.encode())))
    @settings(max_examples=200, deadline=None)
    def check(text):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()
