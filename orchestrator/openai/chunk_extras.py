"""What the chunks of a stream show beside text, as the request asks: token ids, and usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.answer_format import usage_so_far
from mlx_dp.orchestrator.openai.token_ids import EncodedIds

_encode: Final = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkExtras:
    """``prompt_tokens`` and ``prompt_ids`` have an entry for each choice.

    The shapes are vLLM's: the prompt's ids come once, in the first chunk of a choice, and each
    chunk has those of its own tokens, also of tokens that have no text. With ``continuous_usage``,
    each chunk counts its choice so far.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    prompt_tokens: Sequence[int] = ()
    prompt_ids: Sequence[bytes] | None = None
    """As JSON; None: no ids are shown."""

    @property
    def constant(self) -> bool:
        """All chunks but the last end in the same way."""
        return self.prompt_ids is None and not self.continuous_usage

    def token_ids(self, ids: Sequence[int] = ()) -> bytes:
        """Return the member of a choice that has its tokens, with the comma before it."""
        return b"" if self.prompt_ids is None else b',"token_ids":' + _encode(ids)

    def whole_token_ids(self, ids: EncodedIds) -> bytes:
        """The same for a choice that is complete."""
        return b"" if self.prompt_ids is None else b',"token_ids":' + ids.array

    def prompt_token_ids(self, index: int) -> bytes:
        """Return the member that has the prompt of a choice, with the comma before it."""
        return b"" if self.prompt_ids is None else b',"prompt_token_ids":' + self.prompt_ids[index]

    def event_end(self, index: int, num_tokens: int) -> bytes:
        """Return what follows the choices in an event of this choice.

        With include_usage, OpenAI puts a null on every chunk but the last.
        """
        if self.continuous_usage:
            usage = usage_so_far(self.prompt_tokens[index], num_tokens)
            return b',"usage":%b}\n\n' % _encode(usage)
        return b',"usage":null}\n\n' if self.include_usage else b"}\n\n"
