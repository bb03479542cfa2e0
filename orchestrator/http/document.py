"""The OpenAPI document: what routes take and answer, which FastAPI cannot see."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mlx_dp.orchestrator.openai.chat_request import ChatRequest
from mlx_dp.orchestrator.openai.completion_request import CompletionRequest

Json = dict[str, Any]

_ERROR: Final = "Error"
_REFERENCE: Final = "#/components/schemas/{model}"
_BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
# Their refusals say what each owner did.
_REPORTS: Final = frozenset({"/flush_cache", "/health_generate"})
_ERRORS: Final = {
    "400": "The request is wrong: the message names the field, the value and the bound.",
    "401": "The API key is missing or wrong.",
    "403": "The endpoint may not be called by this name, or from this page.",
    "404": "There is no such model or route.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is no plain JSON by its headers.",
    "429": "The queue is full: come back after Retry-After seconds.",
    "431": "The head is too large.",
    "500": "A bug of ours.",
    "502": "The answer was lost with its worker.",
    "503": "Nobody is ready to serve: come back after Retry-After seconds.",
    "504": "The request's own time is over.",
}


def install_document(app: FastAPI) -> None:
    """Have the app describe its routes in full. It is made once, when first asked for."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    # The way that FastAPI's own pages give.
    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> Json:
    made: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: Json = made.setdefault("components", {}).setdefault("schemas", {})
    schemas[_ERROR] = _error_schema()
    for path, operations in made["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            # Nothing is validated by FastAPI itself, whose errors have another shape.
            responses.pop("422", None)
            responses.update({status: _error(why) for status, why in _ERRORS.items()})
            if path in _REPORTS:
                responses["503"]["content"] = {"application/json": {"schema": {"type": "object"}}}
            if path in _BODIES:
                operation["requestBody"] = _body(_BODIES[path], schemas)
                # A schema would be of the whole stream to some tools, and of each event to others.
                responses["200"]["content"]["text/event-stream"] = {}
    made["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {}}
    return made


def _body(kind: type[BaseModel], schemas: Json) -> Json:
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    reference = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _error(why: str) -> Json:
    reference = {"$ref": _REFERENCE.format(model=_ERROR)}
    return {"description": why, "content": {"application/json": {"schema": reference}}}


def _error_schema() -> Json:
    optional = {"type": ["string", "null"]}
    members = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": optional,
        "code": optional,
    }
    inner = {"type": "object", "required": list(members), "properties": members}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
