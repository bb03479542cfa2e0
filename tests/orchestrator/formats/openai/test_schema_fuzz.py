"""Valid and invalid requests from the OpenAPI document: responses match it, and no 500."""

from dataclasses import replace

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from mlx_dp.orchestrator.http.access.open_routes import OPEN_PATHS
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.scripted_service import OPTIONS, ScriptedService

SERVICE = ScriptedService()
KEYED = replace(OPTIONS, api_key="sk-test")
WITH_KEY = {"Authorization": "Bearer sk-test"}
MESSAGES = [{"role": "user", "content": "a"}]
ASKED = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": MESSAGES}}


def operations_of(options, **headers: str) -> list:
    app = create_app(SERVICE, options, FakeTextModel(512))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)
    return [found.ok() for found in schema.get_all_operations()]


OPERATIONS = operations_of(OPTIONS)
KEYED_OPERATIONS = operations_of(KEYED, **WITH_KEY)
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def test_every_route_for_clients_is_in_the_document() -> None:
    paths = {operation.path for operation in OPERATIONS}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/loads"} <= paths


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda found: found.label)
def test_answers_are_as_documented(operation) -> None:
    statuses = run(operation, GenerationMode.POSITIVE)
    assert statuses & {200, 202, 404}


@pytest.mark.parametrize(
    "operation", [found for found in OPERATIONS if found.body], ids=lambda found: found.label
)
def test_refusals_are_as_documented(operation) -> None:
    checks = (*CHECKS, negative_data_rejection)
    assert run(operation, GenerationMode.NEGATIVE, checks=checks, examples=30) == {400}


@pytest.mark.parametrize(
    "operation", [found for found in OPERATIONS if found.body], ids=lambda found: found.label
)
def test_streams_are_as_documented(operation) -> None:
    body = {**ASKED[operation.path], "stream": True}
    case = operation.Case(body=body, media_type="application/json")
    response = case.call()
    assert response.headers["content-type"] == ["text/event-stream; charset=utf-8"]
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-tes"}], ids=["none", "other"])
@pytest.mark.parametrize("operation", KEYED_OPERATIONS, ids=lambda found: found.label)
def test_without_the_key_only_open_routes_answer(operation, headers) -> None:
    statuses = run(operation, GenerationMode.POSITIVE, headers=headers, examples=2)
    assert (statuses == {401}) == (operation.path not in OPEN_PATHS), statuses


@pytest.mark.parametrize("operation", KEYED_OPERATIONS, ids=lambda found: found.label)
def test_with_the_key_answers_are_as_documented(operation) -> None:
    assert 401 not in run(operation, GenerationMode.POSITIVE, headers=WITH_KEY, examples=5)


def run(operation, mode: GenerationMode, *, checks=CHECKS, headers=None, examples=20) -> set[int]:
    """Call the route with some requests, and return the statuses."""
    statuses: set[int] = set()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case) -> None:
        SERVICE.answers.clear()
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        case.validate_response(response, checks=checks)

    ask()
    return statuses
