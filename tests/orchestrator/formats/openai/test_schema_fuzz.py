"""Valid and invalid requests from the OpenAPI document: responses match it, and no 500.

schemathesis is imported late: it takes seconds, which no collection should wait for. So tests are
parametrized by the labels that it gives the document's operations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mlx_dp.orchestrator.http.access.route_paths import OPEN_PATHS
from mlx_dp.orchestrator.http.app import create_app
from mlx_dp.orchestrator.text.fake_tokenizer import FakeTextModel
from tests.support.http.scripted_service import OPTIONS, ScriptedService

SERVICE = ScriptedService()
KEYED = replace(OPTIONS, api_key="sk-test")
WITH_KEY = {"Authorization": "Bearer sk-test"}
MESSAGES = [{"role": "user", "content": "a"}]
ASKED = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": MESSAGES}}
DOCUMENTED: Mapping[str, Mapping[str, Any]] = {
    f"{method.upper()} {path}": operation
    for path, methods in create_app(SERVICE, OPTIONS, FakeTextModel(512)).openapi()["paths"].items()
    for method, operation in methods.items()
}
WITH_BODY = [label for label, operation in DOCUMENTED.items() if "requestBody" in operation]


@lru_cache
def operations(*, keyed: bool) -> Mapping[str, Any]:
    """The operations of a server without or with a key, by their labels."""
    import schemathesis

    app = create_app(SERVICE, KEYED if keyed else OPTIONS, FakeTextModel(512))
    headers = WITH_KEY if keyed else {}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)
    found = [each.ok() for each in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def checks(*, negative: bool = False) -> Sequence[Callable[..., Any]]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as openapi

    return (
        not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
        *((openapi.negative_data_rejection,) if negative else ()),
    )


@pytest.mark.parametrize("keyed", [False, True])
def test_every_operation_has_its_tests(keyed: bool) -> None:
    found = operations(keyed=keyed)
    assert found.keys() == DOCUMENTED.keys()
    assert [label for label, operation in found.items() if operation.body] == WITH_BODY


def test_every_route_for_clients_is_in_the_document() -> None:
    paths = {operation.path for operation in operations(keyed=False).values()}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/loads"} <= paths


@pytest.mark.parametrize("label", DOCUMENTED)
def test_answers_are_as_documented(label: str) -> None:
    statuses = run(operations(keyed=False)[label])
    assert statuses & {200, 202, 404}


@pytest.mark.parametrize("label", WITH_BODY)
def test_refusals_are_as_documented(label: str) -> None:
    assert run(operations(keyed=False)[label], negative=True, examples=30) == {400}


@pytest.mark.parametrize("label", WITH_BODY)
def test_streams_are_as_documented(label: str) -> None:
    operation = operations(keyed=False)[label]
    body = {**ASKED[operation.path], "stream": True}
    case = operation.Case(body=body, media_type="application/json")
    response = case.call()
    assert response.headers["content-type"] == ["text/event-stream; charset=utf-8"]
    case.validate_response(response, checks=checks())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-tes"}], ids=["none", "other"])
@pytest.mark.parametrize("label", DOCUMENTED)
def test_without_the_key_only_open_routes_answer(label: str, headers) -> None:
    operation = operations(keyed=True)[label]
    statuses = run(operation, headers=headers, examples=2)
    assert (statuses == {401}) == (operation.path not in OPEN_PATHS), statuses


@pytest.mark.parametrize("label", DOCUMENTED)
def test_with_the_key_answers_are_as_documented(label: str) -> None:
    assert 401 not in run(operations(keyed=True)[label], headers=WITH_KEY, examples=5)


def run(operation, *, negative: bool = False, headers=None, examples: int = 20) -> set[int]:
    """Call the route with some requests, and return the statuses."""
    from schemathesis import GenerationMode

    mode = GenerationMode.NEGATIVE if negative else GenerationMode.POSITIVE
    statuses: set[int] = set()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case) -> None:
        SERVICE.answers.clear()
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        case.validate_response(response, checks=checks(negative=negative))

    ask()
    return statuses
