"""The text of one answer, from the tokens of its events: pure, and independent of the owner."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from mlx_dp.orchestrator.service import NewTokens
from mlx_dp.orchestrator.text.detokenizer import Detokenizer
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.proto.token_chunk import TokenLogprob


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with its log-probability; ``text_offset`` is where its text starts."""

    token: int
    logprob: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown now."""

    text: str
    logprobs: tuple[ShownToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs)


def _no_text(_token: int) -> str:
    return ""


class ChoiceText:
    """Turns token ids into text that may be shown, and counts them.

    A stop token is counted but not shown. A stop string and what follows is neither shown nor
    counted beyond the token that completes it. Log-probabilities wait for the text of their
    token, so that they do not give away a stop string either. Stop strings match
    with the names of special tokens, which ``special_text`` gives, though ``detokenizer`` leaves
    them out (``skip_special_tokens``).
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        special_text: Callable[[int], str] = _no_text,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._special_text = special_text
        self._skips_special = skip_special_tokens
        self._waiting: list[ShownToken] = []
        self._decoded_chars = 0
        self._shown_chars = 0
        self.completion_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met: the rest of the answer is not wanted."""
        return self._stops.stopped

    def push(self, new: NewTokens) -> Piece:
        """Take further tokens and return what they allow to show."""
        if not self._stops.active and not new.logprobs:
            self.completion_tokens += len(new.ids)
            return self._piece(self._decode(new.ids))
        texts: list[str] = []
        for at, token in enumerate(new.ids):
            self.completion_tokens += 1
            if new.logprobs:
                self._waiting.append(ShownToken(token, new.logprobs[at], self._decoded_chars))
            texts.append(self._stops.push(self._decode((token,))))
            if not self._stops.stopped and self._stops.active:
                texts.append(self._stops.push(self._hidden_text(token), hidden=True))
            if self._stops.stopped:
                break
        return self._piece("".join(texts))

    def finish(self) -> Piece:
        """Return the rest. It may still turn out to be a stop string."""
        if self.stopped:
            return Piece("")
        rest = self._detokenizer.finish()
        self._decoded_chars += len(rest)
        text = self._stops.push(rest)
        return self._piece(text if self.stopped else text + self._stops.finish(), last=True)

    def _decode(self, ids: tuple[int, ...]) -> str:
        if ids and ids[-1] in self._stop_token_ids:
            ids = ids[:-1]
        text = self._detokenizer.push(ids)
        self._decoded_chars += len(text)
        return text

    def _hidden_text(self, token: int) -> str:
        if self._skips_special or token in self._stop_token_ids:
            return self._special_text(token)
        return ""

    def _piece(self, text: str, *, last: bool = False) -> Piece:
        self._shown_chars += len(text)
        if not self._waiting:
            return Piece(text)
        num_ready = len(self._waiting)
        if self.stopped or not last:
            # Tokens without text of their own wait for the text behind them. They may be many.
            num_ready = bisect_left(self._waiting, self._shown_chars, key=_text_offset)
        ready = tuple(self._waiting[:num_ready])
        del self._waiting[: None if self.stopped else num_ready]
        return Piece(text, ready)


def _text_offset(token: ShownToken) -> int:
    return token.text_offset
