"""A GGUF vocabulary as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Replace as ReplaceDecoder
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.gguf.file import GgufFile

_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A wrong splitter gives wrong token ids without any error, so only exactly known ones are here. The
# first group splits single digits, then GPT-2's words.
_DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_GPT2_SPLITTERS = frozenset({"gpt-2"})
_LLAMA3_SPLITTERS = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NORMAL = 1
_BYTE = 6
_SPACE = "\u2581"


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Write the two tokenizer files that transformers and mlx-lm load."""
    tokenizer = build_tokenizer(gguf)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(gguf), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_token_ids(gguf: GgufFile) -> list[int]:
    """Return the tokens that end an answer: end of text, and end of turn if the file has one."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [gguf.integer(key) for key in keys if gguf.has(key)]
    return list(dict.fromkeys(ids))


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Return the tokenizer, with every token at its own id."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    vocabulary = _vocabulary(tokens)
    model = gguf.text("tokenizer.ggml.model")
    match model:
        case "gpt2":
            tokenizer, starts_text = _byte_level_tokenizer(gguf, vocabulary), False
        case "llama":
            tokenizer, starts_text = _sentencepiece_tokenizer(gguf, vocabulary), True
        case _:
            raise ConfigError(
                f"cannot convert a GGUF with a {model!r} tokenizer: only 'gpt2' and 'llama' are "
                "supported; use the model's mlx-lm version from the hub instead"
            )
    _add_special_tokens(tokenizer, tokens, gguf.integers("tokenizer.ggml.token_type"))
    if gguf.flag("tokenizer.ggml.add_bos_token", starts_text):
        bos = _role(gguf, "bos_token_id", tokens)
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", "$B"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer


def _byte_level_tokenizer(gguf: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    splitter, ignore_merges = _splitter(gguf.text("tokenizer.ggml.pre", "default"))
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=_merges(gguf, vocabulary), ignore_merges=ignore_merges)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError(
            f"this GGUF has {len(tokens)} tokens but only {len(vocabulary)} different ones"
        )
    return vocabulary


def _merges(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in gguf.strings("tokenizer.ggml.merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ConfigError(f"this GGUF has a broken BPE merge: {line!r}")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ConfigError(f"this GGUF has a BPE merge of unknown tokens: {line!r}")
        merges.append((left, right))
    return merges


def _splitter(name: str) -> tuple[PreTokenizer, bool]:
    """Return the pre-tokenizer of this name, and whether whole words skip the merges."""
    if name in _DIGIT_SPLITTERS:
        parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        return PreTokenizers(parts), False
    if name in _GPT2_SPLITTERS:
        return ByteLevel(add_prefix_space=False, use_regex=True), False
    if name in _LLAMA3_SPLITTERS:
        words = Split(Regex(_LLAMA3_WORDS), behavior="isolated", invert=False)
        return PreTokenizers([words, ByteLevel(add_prefix_space=False, use_regex=False)]), True
    known = ", ".join(sorted(_DIGIT_SPLITTERS | _GPT2_SPLITTERS | _LLAMA3_SPLITTERS))
    raise ConfigError(
        f"cannot convert a GGUF whose tokenizer.ggml.pre is {name!r}: the known ones are {known}"
    )


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    if len(kinds) != len(tokens):
        raise ConfigError(f"this GGUF has {len(tokens)} tokens but {len(kinds)} token types")
    added = {
        kind: [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, its_kind in zip(tokens, kinds, strict=True)
            if its_kind == kind
        ]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(added[_CONTROL])
    tokenizer.add_tokens(added[_USER_DEFINED])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    assert size == len(tokens), f"{size} tokens after adding the special ones, not {len(tokens)}"
    for index, token in enumerate(tokens):
        assert tokenizer.token_to_id(token) == index, f"token {token!r} moved from {index}"


def _role(gguf: GgufFile, key: str, tokens: list[str]) -> str:
    """Return the token for a role, by the key of its id."""
    index = gguf.integer(f"tokenizer.ggml.{key}")
    if not 0 <= index < len(tokens):
        raise ConfigError(f"this GGUF's {key} is {index}, but it has {len(tokens)} tokens")
    return tokens[index]


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    tokens = gguf.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        # The generic class: a named one would build its own splitter from the vocabulary.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
    }
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        if gguf.has(f"tokenizer.ggml.{key}"):
            config[role] = _role(gguf, key, tokens)
    if gguf.has("tokenizer.chat_template"):
        config["chat_template"] = gguf.text("tokenizer.chat_template")
    return config


def _sentencepiece_tokenizer(gguf: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    """Return the tokenizer without its special tokens.

    SentencePiece joins the neighbours whose union has the highest score. The equivalent merges are
    all splits of every piece in two, ordered by the score of the whole piece.
    """
    scores = gguf.reals("tokenizer.ggml.scores")
    kinds = gguf.integers("tokenizer.ggml.token_type")
    if not len(scores) == len(kinds) == len(vocabulary):
        raise ConfigError("this GGUF has not one score and one type for each of its tokens")
    if kinds.count(_BYTE) != 256:
        raise ConfigError(
            f"cannot convert a GGUF with {kinds.count(_BYTE)} byte tokens in its 'llama' "
            "tokenizer: without all 256 some text would be lost"
        )
    pieces = {piece: index for piece, index in vocabulary.items() if kinds[index] == _NORMAL}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_piece_merges(pieces, scores),
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = Replace(" ", _SPACE)
    words = [ReplaceDecoder(_SPACE, " "), ByteFallback(), Fuse()]
    if gguf.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = Normalizers([Prepend(_SPACE), spaces])
        tokenizer.decoder = Decoders([*words, Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = Decoders(words)
    return tokenizer


def _piece_merges(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
