"""Text in pieces joins to what decoding all at once gives."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlx_dp.orchestrator.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlx_dp.orchestrator.text.loading.tokenizer import TokenizerTextModel
from mlx_dp.orchestrator.text.text_model import ModelFacts

FACTS = ModelFacts(
    path="", model_type="", architectures=(), vocab_size=1, context_length=None, eos_token_ids=()
)


@cache
def byte_level() -> TokenizerTextModel:
    """Bytes and some longer tokens that end inside characters; two added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġw", "or", "Ã©", "ðŁ", "ĺĢ", "Ã"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    return TokenizerTextModel(tokenizer, FACTS)


@cache
def sentencepiece() -> TokenizerTextModel:
    """As Llama 2's: a marker for spaces, bytes for what is unknown, the first space dropped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁a", "a", "b", "▁hello", "lo", "é", "世", "▁世"]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    return TokenizerTextModel(tokenizer, FACTS)


def pieces(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    found, at = [], 0
    for size in [*sizes, len(ids)]:
        found.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*found, detokenizer.finish()]


SIZES = st.lists(st.integers(min_value=0, max_value=3), max_size=40)


@given(ids=st.lists(st.integers(min_value=0, max_value=270), max_size=40), sizes=SIZES)
def test_byte_level_is_exact_for_all_ids(ids: list[int], sizes: list[int]) -> None:
    model = byte_level()
    assert isinstance(model.detokenizer(), ByteDetokenizer)
    assert "".join(pieces(model.detokenizer(), ids, sizes)) == model.decode(ids)


@given(text=st.text(max_size=30), sizes=SIZES)
def test_byte_level_never_splits_a_character(text: str, sizes: list[int]) -> None:
    model = byte_level()
    ids = list(model.encode(text, add_special_tokens=False))
    found = pieces(model.detokenizer(), ids, sizes)
    assert "".join(found) == text
    assert found[-1] == ""


@given(text=st.text(max_size=30).filter(lambda t: "▁" not in t), sizes=SIZES)
def test_sentencepiece_equals_the_whole(text: str, sizes: list[int]) -> None:
    model = sentencepiece()
    assert isinstance(model.detokenizer(), WindowDetokenizer)
    ids = list(model.encode(text, add_special_tokens=False))
    assert "".join(pieces(model.detokenizer(), ids, sizes)) == model.decode(ids)


@given(
    ids=st.lists(
        st.one_of(st.integers(min_value=0, max_value=2), st.integers(min_value=259, max_value=269)),
        max_size=30,
    ),
    sizes=SIZES,
)
def test_sentencepiece_equals_the_whole_for_ids_without_bytes(
    ids: list[int], sizes: list[int]
) -> None:
    """Special and unknown ids in between neither add nor take a space."""
    model = sentencepiece()
    assert "".join(pieces(model.detokenizer(), ids, sizes)) == model.decode(ids)


def test_sentencepiece_keeps_the_space_behind_a_special_token() -> None:
    detokenizer = sentencepiece().detokenizer()
    tokenizer = sentencepiece()
    a, b, eos = (tokenizer._tokenizer.token_to_id(name) for name in ("▁a", "▁a", "</s>"))
    assert detokenizer.push([a]) + detokenizer.push([eos]) + detokenizer.push([b]) == "a a"


def test_bytes_that_never_become_a_character_are_not_hoarded() -> None:
    detokenizer = sentencepiece().detokenizer()
    stray = sentencepiece()._tokenizer.token_to_id("<0x80>")
    text = "".join(detokenizer.push([stray]) for _ in range(1000))
    assert len(text) > 900
    assert set(text) == {"\ufffd"}


def test_window_stays_small_whatever_comes() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "".join("" if token == 1 else chr(token) for token in ids)

    detokenizer = WindowDetokenizer(decode, lambda token: token == 1)
    text = "".join(detokenizer.push([token]) for token in [97, 98, *[1] * 1000, 99])
    assert text == "abc"
    assert max(lengths) < 10
