"""A GGUF's SentencePiece vocabulary as a BPE tokenizer with byte fallback."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence, Strip
from tokenizers.decoders import Replace as ReplaceDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers

from mlx_dp.proto.errors import ConfigError
from mlx_dp.worker.gguf.file import GgufFile

_NORMAL = 1
_BYTE = 6
_SPACE = "\u2581"


def sentencepiece_tokenizer(gguf: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
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
            merges=_merges(pieces, scores),
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = Replace(" ", _SPACE)
    words = [ReplaceDecoder(_SPACE, " "), ByteFallback(), Fuse()]
    if gguf.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = Normalizers([Prepend(_SPACE), spaces])
        tokenizer.decoder = Sequence([*words, Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = Sequence(words)
    return tokenizer


def _merges(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
