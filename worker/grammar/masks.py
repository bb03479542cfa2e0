"""Masks of the tokens that the next step may draw, for rows with a grammar."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.grammar.compiler import GrammarCompiler, GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor

MASK_THREADS: Final = 4
"""Threads that fill masks: other workers and the device need cores too."""
_WORD: Final = 32


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Bit ``t % 32`` of ``bits[i, t // 32]`` is set if batch row ``rows[i]`` may draw token t.

    There is at least one row. The next ``fill`` overwrites ``bits``.
    """

    rows: tuple[int, ...]
    bits: NDArray[np.int32]


class GrammarMasks:
    """The grammars of the rows in one batch, by the rows' keys.

    For each step that has such rows: ``advance`` by the tokens of the step before, then ``fill``.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._states: dict[int, GrammarState] = {}
        self._bits = np.zeros((0, 0), dtype=np.int32)
        self._filled: dict[int, int] = {}
        self._executor: LLExecutor | None = None

    def __len__(self) -> int:
        return len(self._states)

    def join(self, key: int, request: EngineRequest) -> None:
        """Add a row, if it has a grammar. The state starts after its ``output_ids``."""
        if request.grammar is not None:
            self._states[key] = self._compiler.begin(
                request.grammar,
                request.stop_token_ids,
                request.output_ids,
                min_tokens=request.params.min_tokens,
            )

    def leave(self, key: int) -> None:
        self._states.pop(key, None)

    def advance(self, drawn: Iterable[tuple[int, int]]) -> None:
        """Advance by the (key, token) pairs of a step; rows without a grammar are skipped."""
        for key, token in drawn:
            state = self._states.get(key)
            if state is not None:
                assert self._allowed(key, token), f"row {key} drew {token}, which is masked"
                state.advance(token)

    def fill(self, keys: Sequence[int]) -> RowMasks | None:
        """Compute the masks of a batch with these rows, or None when no row has a grammar."""
        rows = tuple(row for row, key in enumerate(keys) if key in self._states)
        if not rows:
            return None
        self._filled = {keys[row]: at for at, row in enumerate(rows)}
        bits = self._room(len(rows))
        states = [self._states[keys[row]] for row in rows]
        self._compute(states, bits)
        for state, mask in zip(states, bits, strict=True):
            self._close(state, mask)
        return RowMasks(rows, bits)

    def faults(self) -> dict[int, str]:
        """Return the faults of rows whose grammar became too costly; their draws do not count."""
        found = {key: state.fault for key, state in self._states.items()}
        return {key: fault for key, fault in found.items() if fault is not None}

    def _compute(self, states: Sequence[GrammarState], bits: NDArray[np.int32]) -> None:
        """Fill on the CPU, without the interpreter lock, rows in parallel."""
        open_rows = [(state.matcher, at) for at, state in enumerate(states) if not state.ended]
        if len(open_rows) == 1:
            [(matcher, at)] = open_rows
            matcher.unsafe_compute_mask_ptr(bits[at].ctypes.data, bits[at].nbytes)
        elif open_rows:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(min(MASK_THREADS, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(
                open_rows, bits.ctypes.data, bits[0].nbytes, len(bits)
            )

    def _close(self, state: GrammarState, mask: NDArray[np.int32]) -> None:
        """Allow only the request's own stop tokens to end the answer."""
        if state.ended:
            mask[:] = -1
            return
        words = mask.view(np.uint32)
        _clear(words, self._compiler.tokenizer.eos_tokens)
        if state.too_short:
            # A stop token of the client may also be part of the grammar's own text.
            going_on = words.copy()
            _clear(going_on, state.stop_token_ids)
            if going_on.any():
                words[:] = going_on
                return
        for token in state.closing_tokens:
            words[token // _WORD] |= np.uint32(1 << token % _WORD)

    def _allowed(self, key: int, token: int) -> bool:
        word = self._bits[self._filled[key], token // _WORD]
        return bool(word >> token % _WORD & 1)

    def _room(self, num_rows: int) -> NDArray[np.int32]:
        width = -(-self._compiler.tokenizer.vocab_size // _WORD)
        if self._bits.shape[0] < num_rows:
            self._bits = np.zeros((num_rows, width), dtype=np.int32)
        return self._bits[:num_rows]


def _clear(words: NDArray[np.uint32], tokens: Iterable[int]) -> None:
    for token in tokens:
        words[token // _WORD] &= np.uint32(~(1 << token % _WORD) & 0xFFFFFFFF)
