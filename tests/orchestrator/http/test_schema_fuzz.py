"""Requests made from the OpenAPI document, good and bad: answers are as it says, and no bug."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_service import OPTIONS, ScriptedService

from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel

SERVICE = ScriptedService()
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(SERVICE, OPTIONS, FakeTextModel(512))
)
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
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
    assert 400 in run(operation, GenerationMode.NEGATIVE)


def run(operation, mode: GenerationMode) -> set[int]:
    """Call the route with some requests, and return the statuses that there were."""
    statuses: set[int] = set()

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case) -> None:
        SERVICE.answers.clear()
        response = case.call()
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    return statuses
