"""More clients, each in an environment of its own: ``make clients``."""

from __future__ import annotations

import pytest

from tests.clients.conftest import QUESTIONS
from tests.clients.environment import run_program
from tests.clients.test_clients import is_answer

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("client", ["llama_index", "pydantic_ai", "dspy"])
def test_replies(url: str, expected: dict[str, str], client: str) -> None:
    """A client's replies are the server's, whole and streamed, plain and searched."""
    output = run_program(f"with_{client}.py", url, QUESTIONS[0], client)
    assert output["whole"] == expected["plain"]
    assert output["search"] == expected["search"]
    for field in {"streamed", "complete"} & output.keys():
        assert output[field] == expected["plain"]
    if client == "pydantic_ai":
        assert output["response"] == expected["plain"]
        assert output["second_turn"]
        assert output["parts"] == ["thinking", "text"]
        assert all(map(is_answer, output["typed"].values()))


def test_instructor(url: str, expected: dict[str, str]) -> None:
    """Replies typed by tools and by a schema; without a type the reply is the server's."""
    output = run_program("with_instructor.py", url, QUESTIONS[0], "instructor")
    assert output["whole"] == expected["plain"]
    assert is_answer(output["TOOLS"])
    assert is_answer(output["JSON_SCHEMA"])


def test_inspect_ai(url: str) -> None:
    """An evaluation of two questions: a search by alias gets both right, a cut reply neither."""
    output = run_program("with_inspect_ai.py", url, QUESTIONS[0], "inspect_ai")
    assert output["plain"] == ["success", 0.0, 48]
    status, accuracy, tokens = output["search"]
    assert (status, accuracy) == ("success", 1.0)
    assert tokens > 48


def test_aiperf(url: str) -> None:
    """NVIDIA's load generator: every streamed chat is completed and timed."""
    output = run_program("with_aiperf.py", url, QUESTIONS[0], "aiperf")
    assert output == {"requests": 8, "errors": 0, "first_token": True}


def test_optillm(url: str) -> None:
    """Its proxy in front asks for several replies and chooses one."""
    output = run_program("with_optillm.py", url, QUESTIONS[0], "optillm")
    assert output.keys() == {"none", "bon", "self_consistency"}
    assert all(output.values())
