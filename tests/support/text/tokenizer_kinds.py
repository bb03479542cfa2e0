"""Small real tokenizers of every kind, as in model directories.

Each is trained on a few sentences. Like Phi's files, ``tokenizer_config.json`` has added tokens
that ``tokenizer.json`` lacks: role markers, of which one ends a turn, and thinking markers.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS: Final = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Say hi to user, assistant and system: they end and start turns.",
    "im_start im_end end start system user assistant evil orders ignore",
    "def f(x):\n    return x < 3 and x > 1 or [x | 2]\n\n\tpass # 123 <s> </s>",
    "Ünïcödé, 日本語 and 😀 are text.  Two spaces, too.",
) * 3

TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] }}\n"
    "{% if m['content'] is string and m['content'].endswith('!') %}{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
IN_CONFIG_ONLY: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
SPECIAL: Final = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and the rest of its files."""

    make: Callable[[], Tokenizer]
    named: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    """Of the tokens that only the configuration has."""


def write_kind(kind: Kind, directory: Path, template: str = TEMPLATE) -> None:
    tokenizer = kind.make()
    tokenizer.save(str(directory / "tokenizer.json"))
    first = max(tokenizer.get_vocab().values()) + 1
    added = dict(tokenizer.get_added_tokens_decoder())
    for number, content in enumerate(IN_CONFIG_ONLY, first):
        special = content in SPECIAL
        entry = AddedToken(content, special=special, normalized=False)
        added[number] = AddedToken(**{**_fields(entry), **kind.flags})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): _fields(entry) for i, entry in added.items()},
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **kind.named,
        "eos_token": "<|im_end|>",
        **kind.config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _fields(entry: AddedToken) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(entry, name) for name in names}


def byte_level(
    normalizer: normalizers.Normalizer | None = None, *, add_prefix_space: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split_byte_level() -> Tokenizer:
    """Like Llama 3: a regular expression of its own, and whole words before merges."""
    trained = json.loads(byte_level().to_str())
    trained["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def sentencepiece_bpe(*, legacy: bool) -> Tokenizer:
    """Like Llama 2: byte tokens for unknown characters, a space before each piece or the first."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    pieces.train_from_iterator(CORPUS, trainer)
    model = json.loads(pieces.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def unigram(*, prepend_scheme: str = "always") -> Tokenizer:
    """Like T5 and XLM-R: its vocabulary has the control tokens as pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=sorted(set("".join(CORPUS)) - {" "}),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_sentencepiece(directory: Path, **config: object) -> None:
    """A directory with only a SentencePiece model, which transformers converts."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": TEMPLATE,
            **config,
        },
        "config.json": {"model_type": "llama"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


_BYTE_LEVEL: Final = {"bos_token": "<|endoftext|>"}
_PIECES: Final = {"bos_token": "<s>", "unk_token": "<unk>"}
_NORMALIZER: Final = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])

KINDS: Final[Mapping[str, Kind]] = {
    "byte_level": Kind(byte_level, _BYTE_LEVEL),
    "byte_level_prefix_space": Kind(lambda: byte_level(add_prefix_space=True), _BYTE_LEVEL),
    "byte_level_strips": Kind(byte_level, _BYTE_LEVEL, flags={"lstrip": True, "rstrip": True}),
    "byte_level_normalized": Kind(
        lambda: byte_level(_NORMALIZER), _BYTE_LEVEL, flags={"normalized": True}
    ),
    "split_byte_level": Kind(split_byte_level, _BYTE_LEVEL),
    "legacy": Kind(lambda: sentencepiece_bpe(legacy=True), _PIECES),
    "legacy_rstrip": Kind(lambda: sentencepiece_bpe(legacy=True), _PIECES, flags={"rstrip": True}),
    "not_legacy": Kind(lambda: sentencepiece_bpe(legacy=False), _PIECES, {"legacy": False}),
    "llama_class": Kind(
        lambda: sentencepiece_bpe(legacy=True),
        _PIECES,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    ),
    "wordpiece": Kind(wordpiece, {"bos_token": "[CLS]", "unk_token": "[UNK]"}),
    "wordpiece_class": Kind(
        wordpiece,
        {"bos_token": "[CLS]", "unk_token": "[UNK]"},
        {"tokenizer_class": "BertTokenizer"},
    ),
    "unigram": Kind(unigram, _PIECES),
    "unigram_first": Kind(lambda: unigram(prepend_scheme="first"), _PIECES),
}
