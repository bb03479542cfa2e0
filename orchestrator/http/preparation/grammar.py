"""Checks that a requested grammar can be followed, before anything is queued."""

from mlx_dp.orchestrator.formats.common.errors import invalid
from mlx_dp.orchestrator.formats.common.generation_request import GenerationRequest
from mlx_dp.orchestrator.http.body.concurrency_limit import ConcurrencyLimit
from mlx_dp.orchestrator.http.preparation.sampling import stop_token_ids
from mlx_dp.orchestrator.text.grammar_check import GrammarCheck
from mlx_dp.orchestrator.text.text_model import ModelFacts


async def check_grammar(
    request: GenerationRequest,
    facts: ModelFacts,
    grammars: GrammarCheck,
    limit: ConcurrencyLimit,
) -> None:
    """Raise ApiError when the model cannot follow the grammar that the request asks for.

    ``limit`` bounds the requests that wait for a grammar which is not known yet.
    """
    if request.grammar is None:
        return
    param, grammar = request.grammar.param, request.grammar.grammar
    if not facts.follows_grammars:
        raise invalid(
            param,
            "the fake engine supports no grammars: leave it out",
            code="unsupported_parameter",
        )
    if not stop_token_ids(request, facts.eos_token_ids):
        raise invalid(param, "this model has no end-of-sequence token: set stop_token_ids")
    if grammars.knows(grammar):
        fault = await grammars.fault(grammar)
    else:
        async with limit.enter():
            fault = await grammars.fault(grammar)
    if fault is not None:
        raise invalid(param, fault, code="invalid_grammar")
