import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dp.proto.errors import ConfigError

mx = pytest.importorskip("mlx.core")
sentencepiece = pytest.importorskip("sentencepiece")

from mlx_dp.worker.gguf.file import GgufFile  # noqa: E402
from mlx_dp.worker.gguf.tokenizer import build_tokenizer  # noqa: E402

pytestmark = pytest.mark.mlx

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "then the other foxes jumped over  the dogs",
    "naïve café 123 456, the end.",
    "def the_function(x):\n    return x + x",
] * 5


def trained():
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=output,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=output.getvalue())


ORACLE = trained()


def kind_of(index):
    if ORACLE.is_byte(index):
        return 6
    if ORACLE.is_control(index):
        return 3
    return 2 if ORACLE.is_unknown(index) else 1


def metadata(**changes):
    indices = range(ORACLE.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [ORACLE.id_to_piece(index) for index in indices],
        "tokenizer.ggml.scores": [ORACLE.get_score(index) for index in indices],
        "tokenizer.ggml.token_type": [kind_of(index) for index in indices],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


TOKENIZER = build_tokenizer(GgufFile({}, metadata()))
WORDS = st.sampled_from(["the", "fox", " ", "  ", "over", "é", "1", "\n", "jump", "👩‍👩", "\x00"])
# The model's own name for a space is the one character that comes back as another.
ANY_TEXT = st.lists(WORDS | st.text(max_size=8), max_size=8).map(
    lambda parts: "".join(parts).replace("\u2581", "")
)


@given(text=ANY_TEXT)
@settings(max_examples=300, deadline=None)
def test_ids_equal_sentencepieces_and_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ids == ORACLE.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_a_prompt_starts_with_the_start_token():
    assert TOKENIZER.encode("the").ids == [1, *ORACLE.encode("the")]


def test_without_the_space_prefix_text_starts_as_it_is():
    tokenizer = build_tokenizer(GgufFile({}, metadata(add_space_prefix=False)))
    encoding = tokenizer.encode("the", add_special_tokens=False)
    assert not encoding.tokens[0].startswith("\u2581")
    assert tokenizer.decode(encoding.ids) == "the"
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": [0.0]}, "not one score"),
        ({"token_type": [1] * ORACLE.get_piece_size()}, "0 byte tokens"),
    ],
)
def test_an_incomplete_vocabulary_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(GgufFile({}, metadata(**changes)))
