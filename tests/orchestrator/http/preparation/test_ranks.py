"""The choice of the owner when a router and its client both name one."""

from typing import Any

import pytest

from tests.support.http.http_calls import CHAT, COMPLETIONS, HI, call, error
from tests.support.http.scripted_service import ScriptedService

RANK = "X-Data-Parallel-Rank"


def ask(path: str, headers: list[str], **body: Any) -> tuple[ScriptedService, Any]:
    """``headers``: values of the rank's header, each on a line of its own."""
    service = ScriptedService()
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    lines = [(RANK, value) for value in headers]
    return service, call(service, "POST", path, headers=lines, json={**prompt, **body})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("headers", "body", "rank"),
    [
        (["1"], {}, 1),
        (["0", "1"], {}, 1),
        (["1", "0"], {}, 0),
        (["0, 1"], {}, 1),
        (["0,0", "1 , 0", " 1 "], {}, 1),
        # Earlier values are not the router's, and may be anything.
        (["99", "1"], {}, 1),
        (["x", "1"], {}, 1),
        (["1"], {"routed_dp_rank": 0}, 1),
        (["1"], {"data_parallel_rank": 0}, 1),
        ([], {"routed_dp_rank": 1}, 1),
        ([], {"data_parallel_rank": 1}, 1),
        ([], {"routed_dp_rank": 1, "data_parallel_rank": 1}, 1),
        ([], {"routed_dp_rank": None, "data_parallel_rank": 1}, 1),
        ([], {}, None),
    ],
)
def test_the_last_header_counts_and_then_the_body(
    path: str, headers: list[str], body: dict[str, Any], rank: int | None
) -> None:
    service, response = ask(path, headers, **body)
    assert response.status_code == 200, response.text
    assert service.generation.routed_dp_rank == rank


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_asks_for_two_ranks_is_refused(path: str) -> None:
    service, response = ask(path, [], routed_dp_rank=0, data_parallel_rank=1)
    found = error(response, 400)
    assert found["param"] == "routed_dp_rank"
    assert "it is 0 and data_parallel_rank is 1: give one of them" in found["message"]
    assert not service.answers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("headers", [["1", "2"], ["1", "x"], ["1,"], [""], ["0", "-1"]])
def test_a_last_header_that_names_no_owner_is_refused(path: str, headers: list[str]) -> None:
    found = error(ask(path, headers)[1], 400)
    assert found["param"] == RANK
    assert "0 to 1" in found["message"]
