"""A real model in a real worker, with rows that follow grammars beside free ones."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("mlx.core")

from tokenizers import Tokenizer

from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import Down, Start, Submit
from mlx_dp.proto.messages.events import FinishReason, Preempted, Rejected
from mlx_dp.proto.messages.grammar import Grammar
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.worker.engine import mlx_engine
from mlx_dp.worker.startup import run_worker
from tests.support.batches.grammar_answers import json_schema, lark, regex
from tests.support.worker.fake_controller import Request
from tests.support.worker.scripted_channel import ScriptedChannel
from tests.support.worker.worker_starts import mlx_start, no_warm_up

pytestmark = [pytest.mark.mlx, pytest.mark.model]

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "capital"],
    "additionalProperties": False,
}
ABOUT = "Describe Paris as JSON with city, inhabitants, capital."
ABOUT_PARIS = json_schema(json.dumps(SCHEMA))
IN_SLABS = BatchForm(split=True)
"""Which the demo model can always have, and the check that says so takes most of a start."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


def submit(
    tokenizer: Tokenizer,
    request_id: int,
    question: str,
    grammar: Grammar | None,
    *,
    params: SamplingParams = GREEDY,
    output_ids: Sequence[int] = (),
    max_tokens: int = 120,
) -> Submit:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return Submit(
        request_id=request_id,
        epoch=1,
        prompt_ids=tuple(tokenizer.encode(text, add_special_tokens=False).ids),
        output_ids=tuple(output_ids),
        max_tokens=max_tokens,
        stop_token_ids=(END,),
        params=params,
        grammar=grammar,
    )


class Channel(ScriptedChannel):
    """Accepts refusals and errors as responses."""

    def __init__(self, start: Start, script: list[tuple[int, Down]]) -> None:
        super().__init__(start, script, errors=True)
        self.refused: dict[int, Rejected] = {}

    def put_back(self, request: Request, message: Preempted | Rejected) -> None:
        assert isinstance(message, Rejected), message
        self.refused[request.request_id] = message


def answers(model: Path, *script: tuple[int, Submit]) -> Channel:
    """Let a worker answer. Its start chooses no form for the batch, and does not warm up."""
    channel = Channel(mlx_start(model, requests=8), list(script))
    with pytest.MonkeyPatch.context() as patch, no_warm_up():
        patch.setattr(mlx_engine, "choose_form", lambda _: IN_SLABS)
        assert run_worker(channel) is ExitCode.OK
    return channel


@pytest.fixture(scope="module")
def answered(demo_model_dir: Path, tokenizer: Tokenizer) -> Channel:
    """Six requests that meet in a batch, and two whose grammars cannot be followed."""
    return answers(
        demo_model_dir,
        (0, submit(tokenizer, 0, ABOUT, ABOUT_PARIS)),
        (0, submit(tokenizer, 1, "What is the capital of France?", None, max_tokens=40)),
        (2, submit(tokenizer, 2, "A phone number?", regex(r"[0-9]{3}-[0-9]{4}"))),
        (3, submit(tokenizer, 3, ABOUT, ABOUT_PARIS, params=SAMPLED)),
        (4, submit(tokenizer, 4, "Is rain wet?", lark('start: "yes" | "no"'), params=SAMPLED)),
        (5, submit(tokenizer, 6, "Hello?", regex("("))),
        (5, submit(tokenizer, 7, "Hello?", lark('start: e{100000}\ne: "a"{100000}'))),
        (9, submit(tokenizer, 5, "A dull question?", regex("(maybe )+not"), params=SAMPLED)),
    )


def test_each_row_of_a_batch_follows_its_own_grammar(
    answered: Channel, tokenizer: Tokenizer
) -> None:
    assert answered.most_at_once >= 4, "the requests hardly met"
    text = {i: tokenizer.decode(answered.received[i].ids) for i in range(6)}
    assert text[1] == "The capital of France is Paris."
    for i in (0, 3):
        jsonschema.validate(json.loads(text[i]), SCHEMA)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text[2])
    assert text[4] in ("yes", "no")
    assert re.fullmatch("(maybe )+not|(maybe )+(maybe)?|maybe", text[5])
    for i in range(5):
        finished = answered.received[i].finished
        assert finished is not None
        assert finished.reason is FinishReason.STOP, (i, text[i], finished)


def test_an_answer_that_moves_to_another_owner_goes_on_the_same(
    answered: Channel, demo_model_dir: Path, tokenizer: Tokenizer
) -> None:
    script: list[tuple[int, Submit]] = []
    wholes: list[list[int]] = []
    for first, params in ((0, GREEDY), (3, SAMPLED)):
        whole = answered.received[first].ids
        assert len(whole) > 12
        for cut in (1, len(whole) // 2, len(whole) - 1):
            moved = submit(
                tokenizer, len(wholes), ABOUT, ABOUT_PARIS, params=params, output_ids=whole[:cut]
            )
            script.append((0, moved))
            wholes.append(whole)
    again = answers(demo_model_dir, *script)
    for i, whole in enumerate(wholes):
        assert again.received[i].ids == whole


def test_a_grammar_that_fails_ends_its_request_alone(answered: Channel) -> None:
    assert answered.refused.keys() == {6}
    assert "unclosed" in answered.refused[6].message
    failed = answered.received[7].finished
    assert failed is not None
    assert failed.reason is FinishReason.ERROR
    assert "Too many items" in failed.message
    others = [answered.received[i].finished for i in range(6)]
    assert all(other is not None and other.reason is not FinishReason.ERROR for other in others)
