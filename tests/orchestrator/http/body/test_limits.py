"""The wait for a parsing process is bounded in number and in time."""

import asyncio
import json
import sys
from typing import Any

import pytest

from mlx_dp.orchestrator.formats.common.errors import ApiError
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.formats.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.formats.openai.completion_request import CompletionRequest
from mlx_dp.orchestrator.formats.openai.openai_format import ChatCompletion
from mlx_dp.orchestrator.http.body.body_parser import CHILDREN, INLINE_SIGNS, BodyParser
from mlx_dp.orchestrator.http.body.limits import ConcurrencyLimit
from mlx_dp.orchestrator.http.preparation.sampling import check_grammar
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from mlx_dp.orchestrator.text.grammar_check import GrammarCheck
from mlx_dp.orchestrator.text.text_model import ModelFacts
from mlx_dp.proto.messages.grammar import Grammar
from tests.support.http.http_calls import HI


def refusal(caught: pytest.ExceptionInfo[ApiError]) -> tuple[int, dict[str, str]]:
    return caught.value.status, caught.value.headers


def test_one_too_many_is_refused_and_places_are_given_back() -> None:
    async def run() -> None:
        limit = ConcurrencyLimit("things", max_waiting=2)
        async with limit.enter():
            async with limit.enter():
                with pytest.raises(ApiError, match="too many things") as caught:
                    async with limit.enter():
                        raise AssertionError("no second request enters")
                assert refusal(caught) == (429, {"retry-after": "1"})
            async with limit.enter():
                assert limit.waiting == 2
        assert limit.waiting == 0

    asyncio.run(run())


def test_a_request_that_waits_too_long_is_refused() -> None:
    async def run() -> None:
        limit = ConcurrencyLimit("things", limit_s=0.01)
        with pytest.raises(ApiError) as caught:
            async with asyncio.timeout(20), limit.enter():
                await asyncio.Event().wait()
        assert refusal(caught) == (429, {"retry-after": "1"})
        assert limit.waiting == 0

    asyncio.run(run())


@pytest.mark.system
def test_a_large_body_waits_only_so_long_for_its_process() -> None:
    code = "import sys, time; sys.stdin.buffer.read(); time.sleep(0.5); sys.exit(3)"

    async def run() -> None:
        parser = BodyParser((sys.executable, "-c", code), wait_limit_s=0.01)
        body = json.dumps({"prompt": [1] * (10 * INLINE_SIGNS)}).encode()
        parsing = [
            asyncio.create_task(parser.parse(CompletionRequest, body)) for _ in range(CHILDREN + 1)
        ]
        *first, last = await asyncio.gather(*parsing, return_exceptions=True)
        assert [type(each) for each in first] == [RuntimeError] * CHILDREN
        assert isinstance(last, ApiError)
        assert last.status == 429

    asyncio.run(run())


class Follows(FakeTextModel):
    @property
    def facts(self) -> ModelFacts:
        facts = super().facts
        return ModelFacts(
            path=facts.path,
            model_type=facts.model_type,
            architectures=facts.architectures,
            vocab_size=facts.vocab_size,
            context_length=None,
            eos_token_ids=facts.eos_token_ids,
        )


class Checks(GrammarCheck):
    """Has compiled one grammar, and never ends with others."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[Grammar] = set()

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self.known

    async def fault(self, grammar: Grammar) -> str | None:
        if not self.known:
            self.known.add(grammar)
        elif grammar not in self.known:
            await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("bounds", [{"max_waiting": 0}, {"limit_s": 0.01}])
def test_new_grammars_wait_within_bounds_and_known_ones_not_at_all(bounds: dict[str, Any]) -> None:
    def fields(regex: str) -> GenerationRequest:
        body = ChatRequest.model_validate({"messages": HI, "regex": regex})
        return ChatCompletion.accept(body).generation

    async def run() -> None:
        facts, checks = Follows(512).facts, Checks()
        await check_grammar(fields("a"), facts, checks, ConcurrencyLimit("grammars"))
        limit = ConcurrencyLimit("grammars", **bounds)
        with pytest.raises(ApiError, match="too many grammars") as caught:
            async with asyncio.timeout(20):
                await check_grammar(fields("b"), facts, checks, limit)
        assert refusal(caught) == (429, {"retry-after": "1"})
        await check_grammar(fields("a"), facts, checks, limit)

    asyncio.run(run())
