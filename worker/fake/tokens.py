"""The fake engine's tokens: a documented function, so any worker can continue another's answer.

The token at answer position ``p`` is a function of

- the engine's seed,
- the request's seed, unless it is greedy (then 0 stands in for it),
- the prompt's token ids (``output_ids`` are answer, and count as positions),
- and ``p`` alone,

and of nothing else: neither the batch, nor the slot, nor how the prompt was chunked, nor which
worker runs it. Read as bytes, an answer is lower-case words of five letters with spaces between.
A request with a ``logit_bias`` of 100 gets the first such token at every position. With an end
token, a client can so make an answer end at once, or after ``min_tokens``; no end token is drawn
otherwise. All other sampling parameters are ignored. Token ids are taken modulo the vocabulary
size.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Final

from mlx_dp.proto.messages.events import TokenLogprob
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.sampling.hashing import GOLDEN, scramble

# All words have the same length, so a position determines its letter directly.
_WORD_TOKENS: Final = 6
_WORDS: Final = (
    b"about above after again along among apple arise basin beach begin below birch black bloom "
    b"board brave bread brick brief bring broad brown build cabin cargo cedar chalk chart clean "
    b"clear climb clock cloud coast coral crane creek daily delta depth dream drift eagle early "
    b"earth empty equal fable field first flame float flour focus forge fresh frost fruit giant "
)
_NUM_WORDS: Final = len(_WORDS) // _WORD_TOKENS
_FORCING_BIAS: Final = 100.0
_FIRST_PRINTABLE: Final = 32
_NUM_PRINTABLE: Final = 95


class FakeAnswer:
    """The tokens of one request by position."""

    def __init__(
        self,
        engine_seed: int,
        vocab_size: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for number in (engine_seed, 0 if params.greedy else params.seed, *prompt_ids):
            digest.update(number.to_bytes(8, "little"))
        self._key = int.from_bytes(digest.digest(), "little")
        self._vocab_size = vocab_size
        self._num_logprobs = params.logprobs
        self._forced = next(
            (token for token, bias in params.logit_bias if bias == _FORCING_BIAS), None
        )
        self._forced_from = params.min_tokens if self._forced in stop_token_ids else 0

    def token(self, position: int) -> int:
        if self._forced is not None and position >= self._forced_from:
            return self._forced
        word, letter = divmod(position, _WORD_TOKENS)
        start = scramble((self._key + word) * GOLDEN) % _NUM_WORDS * _WORD_TOKENS
        return _WORDS[start + letter] % self._vocab_size

    def logprob(self, position: int) -> TokenLogprob | None:
        """Return halving probabilities: 1/2 for the token drawn, 1/4 for the next, and so on."""
        if self._num_logprobs is None:
            return None
        drawn = self.token(position)
        others = (
            (_FIRST_PRINTABLE + (drawn + step) % _NUM_PRINTABLE) % self._vocab_size
            for step in range(_NUM_PRINTABLE)
        )
        best = list(dict.fromkeys((drawn, *others)))[: self._num_logprobs]
        return TokenLogprob(
            logprob=-math.log(2.0),
            top=tuple((token, -math.log(2.0) * rank) for rank, token in enumerate(best, start=1)),
        )
