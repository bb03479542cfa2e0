"""The text of one choice, from its tokens. Pure, and independent of the owner."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from mlx_dp.orchestrator.api import NewTokens
from mlx_dp.orchestrator.text.detokenizer import Detokenizer
from mlx_dp.orchestrator.text.stop_strings import StopStrings
from mlx_dp.proto.messages.events import TokenLogprob


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with its log-probability; ``text_offset`` is where its text starts."""

    token: int
    logprob: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Output that may be sent now."""

    text: str
    logprobs: tuple[ShownToken, ...] = ()
    ids: tuple[int, ...] = ()
    """Its tokens, if requested: all of them, with or without text."""

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.ids)


def _no_text(_token: int) -> str:
    return ""


class ChoiceText:
    """Turns token ids into text to send, and counts them.

    A stop token is counted but not sent. A stop string is not sent, nor anything after it; tokens
    count up to the one that completes it. Log-probabilities wait for the text of their token, so
    that they do not reveal a stop string. Stop strings also match names of special tokens, from
    ``special_text``, even if ``detokenizer`` leaves those out (``skip_special_tokens``). A stop
    string is not matched within the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        special_text: Callable[[int], str] = _no_text,
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shows_ids: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._special_text = special_text
        self._skips_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._shows_ids = shows_ids
        self._waiting: list[ShownToken] = []
        self._decoded_chars = 0
        self._shown_chars = 0
        self.completion_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was matched: the rest of the output is not needed."""
        return self._stops.stopped

    def push(self, new: NewTokens) -> Piece:
        """Add tokens; return the output that is now certain."""
        if not self._stops.active and not new.logprobs:
            self.completion_tokens += len(new.ids)
            return self._piece(self._decode(new.ids), new.ids)
        num_before = self.completion_tokens
        texts: list[str] = []
        for at, token in enumerate(new.ids):
            self.completion_tokens += 1
            if new.logprobs:
                self._waiting.append(ShownToken(token, new.logprobs[at], self._decoded_chars))
            texts.append(self._stops.push(self._decode((token,)), may_end=self._may_end))
            if not self._stops.stopped and self._stops.active:
                name = self._hidden_text(token)
                texts.append(self._stops.push(name, hidden=True, may_end=self._may_end))
            if self._stops.stopped:
                break
        taken = new.ids[: self.completion_tokens - num_before]
        return self._piece("".join(texts), taken)

    def finish(self) -> Piece:
        """Return the rest of the output, unless it completes a stop string."""
        if self.stopped:
            return Piece("")
        rest = self._detokenizer.finish()
        self._decoded_chars += len(rest)
        text = self._stops.push(rest, may_end=self._may_end)
        return self._piece(text if self.stopped else text + self._stops.finish(), last=True)

    @property
    def _may_end(self) -> bool:
        return self.completion_tokens > self._min_tokens

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

    def _piece(self, text: str, ids: tuple[int, ...] = (), *, last: bool = False) -> Piece:
        ids = ids if self._shows_ids else ()
        self._shown_chars += len(text)
        if not self._waiting:
            return Piece(text, (), ids)
        num_ready = len(self._waiting)
        if self.stopped or not last:
            # Tokens without text wait for the text after them. There may be many.
            num_ready = bisect_left(self._waiting, self._shown_chars, key=_text_offset)
        ready = tuple(self._waiting[:num_ready])
        del self._waiting[: None if self.stopped else num_ready]
        return Piece(text, ready, ids)


def _text_offset(token: ShownToken) -> int:
    return token.text_offset
