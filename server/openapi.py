"""The OpenAPI document, with the responses that are really given."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "request_id": {"type": ["string", "null"]},
            },
        }
    },
}
STREAMS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/search",
        "/v1/search/{search_id}/branch",
    }
)
JSON = {"application/json": {"schema": {"type": "object"}}}
EVENTS = {"text/event-stream": {}}
TEXT = {"text/plain": {}}


def describe(app: FastAPI) -> None:
    """Give the app's document the responses of each route: what it returns, and one error shape."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = made()
            found.setdefault("components", {}).setdefault("schemas", {})["Error"] = ERROR
            for path, operations in found["paths"].items():
                for operation in operations.values():
                    operation["responses"] = _responses(path)
        return app.openapi_schema or made()

    app.openapi = document  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    content = JSON
    if path == "/metrics":
        content = TEXT
    elif path.endswith("/events"):
        content = EVENTS
    elif path in STREAMS:
        content = JSON | EVENTS
    said = {"200": {"description": "as asked", "content": content}}
    if path.startswith("/v1/search") and path in STREAMS:
        said["202"] = {"description": "runs in the background", "content": JSON}
    schema = {"$ref": "#/components/schemas/Error"}
    failed = {"description": "an error", "content": {"application/json": {"schema": schema}}}
    return said | {"default": failed}
