"""The playground at ``/``: plain modules and styles out of ``server/playground``, nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from models.tasks import TASKS
from search.spec import PolicyName, SearchSpec
from server.api_errors import ApiError
from server.service import Service, own_version

FOLDER = Path(__file__).parent / "playground"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
EXAMPLES = 3
"""Questions of each bundled task that are offered."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent: its bytes, headers and entity tag."""

    body: bytes
    headers: dict[str, str]
    tag: str


def page_routes(service: Service) -> APIRouter:
    """The routes, bound to a service; they are open, for the page asks for the key itself."""
    router = APIRouter(include_in_schema=False)
    assets = read_assets(FOLDER)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return _send(assets[PAGE], request)

    @router.get("/playground/facts.json")
    async def known() -> Response:
        return JSONResponse(page_facts(service), headers=HEADERS)

    @router.api_route("/playground/{name}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise ApiError(404, "not_found", "the playground has no such file")
        return _send(assets[name], request)

    return router


@cache
def read_assets(folder: Path) -> dict[str, Asset]:
    """Every file of the playground by its name."""
    found = {}
    for path in sorted(folder.iterdir()):
        body = path.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = HEADERS | {"content-type": TYPES[path.suffix], "etag": tag}
        found[path.name] = Asset(body, headers, tag)
    return found


def page_facts(service: Service) -> dict[str, Any]:
    """What the page must know before it asks anything: nothing that a key protects."""
    settings = service.settings
    defaults = SearchSpec()
    return {
        "version": own_version(),
        "key_needed": len(service.keys) > 0,
        "policies": list(get_args(PolicyName)),
        "policy": defaults.policy,
        "width": defaults.width,
        "max_width": settings.max_width,
        "examples": example_questions(),
    }


@cache
def example_questions() -> dict[str, list[str]]:
    """A few questions of each bundled task."""
    return {name: task.questions("dev", EXAMPLES) for name, task in TASKS.items()}


def _send(asset: Asset, request: Request) -> Response:
    """The file, or 304 to a browser that has it."""
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.tag in known or f"W/{asset.tag}" in known:
        return Response(status_code=304, headers=asset.headers)
    return Response(asset.body, headers=asset.headers)
