"""The playground's files as they are served; ``test_playground.py`` uses it in a browser."""

from __future__ import annotations

import re
from typing import get_args

import httpx2
import pytest

from models.tasks import TASKS
from search.spec import PolicyName
from server.playground_routes import FOLDER, KNOWN_FORMS

TYPES = {
    "text/html; charset=utf-8",
    "text/javascript; charset=utf-8",
    "text/css; charset=utf-8",
    "image/svg+xml",
}


@pytest.mark.promise(
    "The playground loads files from its own server only, and its content policy forbids all "
    "others."
)
async def test_the_page_needs_nothing_from_elsewhere(http: httpx2.AsyncClient) -> None:
    """Every file that a file names is served, with its type and a policy that forbids others."""
    visited: set[str] = set()
    waiting = ["/"]
    while waiting:
        path = waiting.pop()
        visited.add(path)
        answer = await http.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["content-type"] in TYPES
        references = re.findall(r'(?:src|href)="(playground/[^"]+)"|from "\./([^"]+)"', answer.text)
        links = {"/" + (page or f"playground/{module}") for page, module in references}
        waiting += links - visited - set(waiting)
        assert not re.findall(r"https?://(?!www\.w3\.org)", answer.text)
    assert {path.removeprefix("/playground/") for path in visited - {"/"}} == {
        file.name for file in FOLDER.iterdir() if file.name not in ("index.html", "recorded.json")
    }
    recorded = await http.get("/playground/recorded.json")
    assert recorded.headers["content-type"] == "application/json"
    assert {recording["task"] for recording in recorded.json()} <= TASKS.keys()


async def test_a_browser_that_has_a_file_is_not_sent_it_again(http: httpx2.AsyncClient) -> None:
    """It sends the file's tag; HEAD gets no body."""
    first = await http.get("/playground/main.js")
    tag = first.headers["etag"]
    cached = await http.get("/playground/main.js", headers={"if-none-match": f'"other", W/{tag}'})
    assert (cached.status_code, cached.content) == (304, b"")
    other_file = await http.get("/playground/tree.js", headers={"if-none-match": tag})
    assert other_file.status_code == 200
    assert (await http.head("/")).status_code == 200
    assert (await http.get("/playground/app.py")).status_code == 404


def test_what_the_bundled_model_knows_is_told_by_how_questions_begin() -> None:
    """The forms match every task's questions, and no other text."""
    forms = [re.compile(form.replace("(?<", "(?P<")) for form in KNOWN_FORMS]
    for task in TASKS.values():
        for question in task.questions("dev", 20):
            assert any(form.match(question) for form in forms)
    assert not any(form.match("Hello, who are you?") for form in forms)


async def test_the_page_knows_policies_and_examples(http: httpx2.AsyncClient) -> None:
    """It has every policy, the defaults of a search, and questions of each bundled task."""
    facts = (await http.get("/playground/facts.json")).json()
    assert facts["policies"] == [*get_args(PolicyName), "auto"]
    assert (facts["policy"], facts["width"], facts["key_needed"]) == ("rebase", 16, False)
    assert facts["examples"].keys() == TASKS.keys()
    assert all(TASKS[name].matches(q) for name, qs in facts["examples"].items() for q in qs)


@pytest.mark.parametrize("settings", [{"api_keys": "ann:secret"}], indirect=True)
async def test_the_page_is_open_and_asks_for_the_key(http: httpx2.AsyncClient) -> None:
    """Without a key a client gets the page, which says that a key is needed, and nothing else."""
    assert (await http.get("/")).status_code == 200
    facts = (await http.get("/playground/facts.json")).json()
    assert facts["key_needed"] is True
    assert (await http.get("/v1/models")).status_code == 401
