"""More clients that people have, each in an environment of its own: ``make clients``."""

from __future__ import annotations

import pytest

from tests.clients.conftest import QUESTIONS
from tests.clients.environment import told
from tests.clients.test_clients import is_answer

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("client", ["llama_index", "pydantic_ai", "dspy"])
def test_replies(url: str, expected: dict[str, str], client: str) -> None:
    """Whole and streamed, plain and searched, a client says what the server says."""
    found = told(f"with_{client}.py", url, QUESTIONS[0], client)
    assert found["whole"] == expected["plain"]
    assert found["search"] == expected["search"]
    for other in {"streamed", "complete"} & found.keys():
        assert found[other] == expected["plain"]
    if client == "pydantic_ai":
        assert found["response"] == expected["plain"]
        assert found["second_turn"]
        assert found["parts"] == ["thinking", "text"]
        assert all(map(is_answer, found["typed"].values()))


def test_instructor(url: str, expected: dict[str, str]) -> None:
    """Typed by tools and by a schema; without one it says what the server says."""
    found = told("with_instructor.py", url, QUESTIONS[0], "instructor")
    assert found["whole"] == expected["plain"]
    assert is_answer(found["TOOLS"])
    assert is_answer(found["JSON_SCHEMA"])


def test_inspect_ai(url: str) -> None:
    """An evaluation of two, of which a search by alias gets both right and a cut reply none."""
    found = told("with_inspect_ai.py", url, QUESTIONS[0], "inspect_ai")
    assert found["plain"] == ["success", 0.0, 48]
    status, accuracy, drawn = found["search"]
    assert (status, accuracy) == ("success", 1.0)
    assert drawn > 48


def test_aiperf(url: str) -> None:
    """NVIDIA's load generator: every streamed chat is completed and timed."""
    found = told("with_aiperf.py", url, QUESTIONS[0], "aiperf")
    assert found == {"requests": 8, "errors": 0, "first_token": True}


def test_optillm(url: str) -> None:
    """Its proxy in front asks for several replies and chooses by more of them."""
    found = told("with_optillm.py", url, QUESTIONS[0], "optillm")
    assert found.keys() == {"none", "bon", "self_consistency"}
    assert all(found.values())
