"""What an answer must match, refused here if no worker could follow it."""

from mlx_dp.orchestrator.http.endpoint import Endpoint
from mlx_dp.orchestrator.openai.errors import invalid
from mlx_dp.orchestrator.openai.fields import GenerationFields
from mlx_dp.orchestrator.openai.sampling import stop_token_ids
from mlx_dp.orchestrator.openai.structured_output import wanted_grammar
from mlx_dp.proto.grammar import Grammar


async def checked_grammar(endpoint: Endpoint, fields: GenerationFields) -> Grammar | None:
    """Return the grammar that the fields ask for. Raises ApiError when it cannot be followed."""
    wanted = wanted_grammar(fields)
    if wanted is None:
        return None
    param, grammar = wanted
    facts = endpoint.text.facts
    if not facts.follows_grammars:
        raise invalid(
            param, "the fake engine follows no grammar: leave it out", code="unsupported_parameter"
        )
    if not stop_token_ids(fields, facts.eos_token_ids):
        raise invalid(param, "this model names no token that ends an answer: set stop_token_ids")
    if endpoint.grammars.knows(grammar):
        fault = await endpoint.grammars.fault(grammar)
    else:
        async with endpoint.grammar_room.wait():
            fault = await endpoint.grammars.fault(grammar)
    if fault is not None:
        raise invalid(param, fault, code="invalid_grammar")
    return grammar
