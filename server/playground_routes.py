"""The playground at ``/``: static files from ``server/playground`` and the facts they need."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from models.bundled import bundled_name
from models.tasks import TASKS, blocksworld, number_puzzle, story
from search.spec import AUTO_POLICY, PolicyName, SearchSpec
from server.model_settings import served_name
from server.service import Service, own_version

FOLDER = Path(__file__).parent / "playground"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
TAUGHT = "sprig"
"""The bundled model that can answer its own tasks only."""
KNOWN_FORMS = [
    f"^{pattern.pattern}".replace("(?P<", "(?<")
    for pattern in (number_puzzle.QUESTION, blocksworld.QUESTION, story.QUERY)
]
"""JavaScript regular expressions for the beginnings of questions that TAUGHT can answer."""
EXAMPLES = 3
"""The number of questions of each bundled task that the page offers."""


class Pages(StaticFiles):
    """Static files, with headers that forbid loading anything from other origins."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        """The response with the file, or 304 if the browser has it."""
        response = super().file_response(*args, **more)
        response.headers.update(HEADERS)
        return response


def page_routes(service: Service) -> APIRouter:
    """Create the page's routes; they need no API key, because the page asks for the key."""
    router = APIRouter(include_in_schema=False)
    pages = Pages(directory=FOLDER)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return await pages.get_response("index.html", request.scope)

    @router.get("/playground/facts.json")
    async def facts() -> Response:
        return JSONResponse(page_facts(service), headers=HEADERS)

    @router.api_route("/playground/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        return await pages.get_response(name, request.scope)

    return router


def page_facts(service: Service) -> dict[str, Any]:
    """The facts that the page needs before its first request; none is protected by a key."""
    settings = service.settings
    defaults = SearchSpec()
    return {
        "version": own_version(),
        "key_needed": len(service.keys) > 0,
        "policies": [*get_args(PolicyName), AUTO_POLICY],
        "policy": defaults.policy,
        "width": defaults.width,
        "max_width": settings.max_width,
        "examples": example_questions(),
        "model": served_name(settings.policy_model),
        "knows": KNOWN_FORMS if bundled_name(settings.policy_model) == TAUGHT else [],
    }


@cache
def example_questions() -> dict[str, list[str]]:
    """A few questions of each bundled task."""
    return {name: task.questions("dev", EXAMPLES) for name, task in TASKS.items()}
