"""Plays a model at random behind grammar masks, and returns the texts."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlx_dp.proto.messages.grammar import Grammar, GrammarKind
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.contract.engine import EngineRequest
from mlx_dp.worker.grammar.masks import GrammarMasks, RowMasks


def json_schema(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def lark(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, text=text)


def request(
    grammar: Grammar | None,
    stops: Sequence[int],
    output_ids: Sequence[int] = (),
    *,
    min_tokens: int = 0,
) -> EngineRequest:
    return EngineRequest(
        prompt_ids=(1,),
        output_ids=tuple(output_ids),
        max_tokens=10_000,
        params=SamplingParams(min_tokens=min_tokens),
        grammar=grammar,
        stop_token_ids=tuple(stops),
    )


def allowed(masks: RowMasks, at: int) -> np.ndarray:
    """The tokens that the mask at index ``at`` allows."""
    bits = np.unpackbits(masks.bits[at].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def play(
    masks: GrammarMasks,
    keys: Sequence[int],
    stops: Sequence[int],
    *,
    seed: int = 0,
    steps: int = 4000,
    prefer: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[int, list[int]]:
    """Draw an allowed token per step and row, until all rows have drawn a stop token.

    ``prefer`` restricts the tokens to draw from, unless none would remain.
    """
    rng = random.Random(seed)
    answers: dict[int, list[int]] = {key: [] for key in keys}
    going = list(keys)
    for _ in range(steps):
        if not going:
            break
        found = masks.fill(going)
        drawn: list[tuple[int, int]] = []
        for row, key in enumerate(going):
            if found is None or row not in found.rows:
                drawn.append((key, rng.choice(stops) if len(answers[key]) > 5 else 10))
                continue
            tokens = allowed(found, found.rows.index(row))
            wanted = tokens if prefer is None else prefer(tokens)
            drawn.append((key, int(rng.choice(wanted if len(wanted) else tokens))))
        masks.advance(drawn)
        for key, token in drawn:
            answers[key].append(token)
        going = [key for key in going if answers[key][-1] not in stops]
    return answers


def text_of(tokenizer_json: Path, ids: Sequence[int]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(tokenizer_json)).decode(list(ids)))
