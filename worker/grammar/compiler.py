"""Grammars compiled for one model, and the position of each answer in its grammar."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_dp.proto.messages.grammar import Grammar, complaint_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

REMEMBERED: Final = 32
"""Compiled grammars that are kept: clients send the same few again and again."""


class GrammarError(Exception):
    """This model cannot follow the grammar. It says nothing about other requests."""


class GrammarState:
    """The position of one answer in its grammar. ``advance`` by each token once, in order.

    A stop token ends the answer wherever the grammar is complete. If the grammar has no
    continuation there, only a stop token may follow.
    """

    def __init__(
        self, matcher: "LLMatcher", stop_token_ids: Sequence[int], *, min_tokens: int = 0
    ) -> None:
        self.matcher: Final = matcher
        self.stop_token_ids: Final = tuple(stop_token_ids)
        self._stopped = False
        self._missing_tokens = min_tokens

    @property
    def too_short(self) -> bool:
        """Whether ``min_tokens`` is not reached: the answer continues if the grammar allows it."""
        return self._missing_tokens > 0

    @property
    def ended(self) -> bool:
        """Whether further tokens do not count: there was a stop token, or the grammar failed."""
        return self._stopped or self.matcher.is_error()

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any more (it became too costly); None: it can."""
        return complaint_line(self.matcher.get_error()) or None

    @property
    def closing_tokens(self) -> tuple[int, ...]:
        """The stop tokens if the answer may end here, else none."""
        return self.stop_token_ids if self.matcher.is_accepting() else ()

    def advance(self, token: int) -> None:
        """Advance by one token. A token that does not fit is a fault from then on."""
        if self.ended:
            return
        self._missing_tokens -= 1
        if token in self.closing_tokens:
            self._stopped = True
        else:
            self.matcher.consume_token(token)


class GrammarCompiler:
    """Compiles for one model. It reads the tokenizer once: in ``warm_up`` or for the first grammar.

    ``vocab_size`` is that of the logits, which may be larger than the tokenizer's.
    """

    def __init__(
        self, model_path: Path, vocab_size: int, *, trust_remote_code: bool = False
    ) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._complaint: str | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def tokenizer(self) -> "LLTokenizer":
        """The model's tokenizer. Raises GrammarError if it cannot be used."""
        self.warm_up()
        if self._tokenizer is None:
            raise GrammarError(self._complaint)
        return self._tokenizer

    def warm_up(self) -> None:
        """Read the tokenizer, which takes longer than a step. If it fails, grammars are refused."""
        if self._tokenizer is not None or self._complaint is not None:
            return
        try:
            self._tokenizer = self._load_tokenizer()
        except GrammarError as error:
            self._complaint = str(error)

    def fault(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> str | None:
        """Return why a request with this grammar cannot be served, or None."""
        if not self._usable(stop_token_ids):
            return "a grammar needs a stop token of the model's vocabulary, to end the answer"
        try:
            self._matcher(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def begin(
        self,
        grammar: Grammar,
        stop_token_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
    ) -> GrammarState:
        """Return the state after ``output_ids``. Raises GrammarError if ``fault`` is not None."""
        matcher = self._matcher(grammar).deep_copy()
        state = GrammarState(matcher, self._usable(stop_token_ids), min_tokens=min_tokens)
        for token in output_ids:
            state.advance(token)
        return state

    def _usable(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        # A model's own stop tokens may lie beyond its logits: those are never drawn.
        return tuple(token for token in stop_token_ids if token < self._vocab_size)

    def _matcher(self, grammar: Grammar) -> "LLMatcher":
        """Return a matcher at the start of the grammar. Copy it before use."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        tokenizer = self.tokenizer
        from llguidance import LLMatcher

        from mlx_dp.proto.messages.grammar_source import guidance_limits, guidance_source

        try:
            source = guidance_source(grammar)
        except ValueError as error:
            raise GrammarError(f"{grammar.kind.value}: {complaint_line(str(error))}") from error
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=guidance_limits())
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind.value}: {complaint_line(matcher.get_error())}")
        return matcher

    def _load_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            source = _tokenizer_json(self._model_path, self._trust_remote_code)
            return LLTokenizer(source, n_vocab=self._vocab_size)
        # The libraries raise bare exceptions.
        except Exception as error:
            raise GrammarError(
                "grammars cannot be followed with this model's tokenizer: "
                f"{complaint_line(str(error))}"
            ) from error


def _tokenizer_json(model_path: Path, trust_remote_code: bool) -> str:
    path = model_path / "tokenizer.json"
    if path.exists():
        return path.read_text("utf-8")
    from transformers import AutoTokenizer

    wrapped: Any = AutoTokenizer.from_pretrained(
        str(model_path), trust_remote_code=trust_remote_code, local_files_only=True
    )
    return str(wrapped.backend_tokenizer.to_str())
