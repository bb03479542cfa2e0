"""The OpenAPI document: request bodies and errors, which FastAPI cannot infer."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mlx_dp.orchestrator.formats.table import FormatTable

_ERROR: Final = "Error"
_REFERENCE: Final = "#/components/schemas/{model}"
# Their 503 reports the outcome at each owner.
_REPORTS: Final = frozenset({"/flush_cache", "/health_generate"})
_ERRORS: Final = {
    "400": "The request is invalid: the message names the field, the value and the bound.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or Origin header is not allowed.",
    "404": "Unknown model or route.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "415": "The headers do not declare plain JSON.",
    "429": "The queue is full: come back after Retry-After seconds.",
    "431": "The head is too large.",
    "500": "Internal server error.",
    "502": "The answer was lost with its worker.",
    "503": "No worker is ready: come back after Retry-After seconds.",
    "504": "The request timed out.",
}


def install_document(app: FastAPI, formats: FormatTable) -> None:
    """Make the app serve the full document, which is built at its first request."""
    bodies = {endpoint.path: endpoint.body for endpoint in formats.endpoints}

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, bodies)
        return app.openapi_schema

    # FastAPI documents this way to replace the document.
    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    made: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = made.setdefault("components", {}).setdefault("schemas", {})
    schemas[_ERROR] = _error_schema()
    for path, operations in made["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            # FastAPI itself validates nothing here, so its own error never occurs.
            responses.pop("422", None)
            responses.update({status: _error(why) for status, why in _ERRORS.items()})
            if path in _REPORTS:
                responses["503"]["content"] = {"application/json": {"schema": {"type": "object"}}}
            if path in bodies:
                operation["requestBody"] = _body(bodies[path], schemas)
                # No schema: tools disagree whether it describes the stream or each event.
                responses["200"]["content"]["text/event-stream"] = {}
    made["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {}}
    return made


def _body(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    reference = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _error(why: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(model=_ERROR)}
    return {"description": why, "content": {"application/json": {"schema": reference}}}


def _error_schema() -> dict[str, Any]:
    optional = {"type": ["string", "null"]}
    members = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": optional,
        "code": optional,
    }
    inner = {"type": "object", "required": list(members), "properties": members}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
