"""Errors as clients see them: one JSON shape, and which exception gets which status and code.

ApiError (an HTTP error in OpenAI's shape)
 ├─ bad_value          400 invalid_value
 ├─ unsupported        400 unsupported_parameter
 └─ every other error that ``translate`` makes

ClientLeft, Deleted and Stopped say why work was cancelled. StreamAborted ends a response that
failed after it had started: the connection is cut, so that the body is visibly incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from search.engine import (
    EngineDown,
    EngineError,
    KvFull,
    PrefixTooLong,
    RewardMissing,
    VerifierFailed,
)
from search.spec import SearchSpec

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; None outside of a request."""

NO_RETRY = {"x-should-retry": "false"}
LONGEST_ECHO = 80
METHOD_NOT_ALLOWED = 405
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class ErrorInfo(BaseModel):
    """Details of an error; ``type`` tells whether the client or the server caused it."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str
    request_id: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorInfo


class ApiError(HTTPException):
    """An error with everything OpenAI's clients read: status, code, message, param, headers."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body. Lone surrogates become escapes, so that it can be encoded as UTF-8."""
        return {
            "error": {
                "message": _encodable(str(self.detail)),
                "type": "invalid_request_error" if self.status_code < 500 else "server_error",
                "param": None if self.param is None else _encodable(self.param),
                "code": self.code,
                "request_id": request_id.get(),
            }
        }


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class ClientLeft(Exception):
    """The client has disconnected; the work for it has been cancelled."""


class Deleted(Exception):
    """The work was cancelled by a DELETE request, not by its own client."""


class Stopped(Exception):
    """The work was cancelled because the server is shutting down."""


class StreamAborted(Exception):
    """The stream has failed and has sent its error; the connection must be cut, not closed."""


def bad_value(param: str, message: str) -> ApiError:
    """The ApiError (400) for a field whose value is not allowed."""
    return ApiError(400, "invalid_value", f"{param}: {message}", param=param)


def unsupported(param: str, hint: str) -> ApiError:
    """The ApiError (400) for a known field of OpenAI's API that this server does not offer."""
    message = f"{param}: not supported by this server; {hint}"
    return ApiError(400, "unsupported_parameter", message, param=param)


def prompt_too_long(tokens: int, context: int, field: str) -> ApiError:
    """A prompt leaves no room for a reply. Clients search for "maximum context length"."""
    message = (
        f"{field}: this model's maximum context length is {context} tokens; "
        f"there are {tokens}, which leave no room for a reply"
    )
    return ApiError(400, "context_length_exceeded", message, param=field)


def beyond_context(field: str, why: str) -> ApiError:
    """The ApiError (400) for a field whose text is longer than the whole context."""
    message = f"{field}: beyond this model's maximum context length: {why}"
    return ApiError(400, "context_length_exceeded", message, param=field)


def nothing_finished(stop_reason: str, policy: str) -> ApiError:
    """The ApiError (504) for a search that ended before any trajectory was finished."""
    code = "deadline_exceeded" if stop_reason == "deadline" else "nothing_finished"
    why = "raise that limit or lower search.width"
    if stop_reason == "width_spent":
        why = "its expansions were spent; raise search.expansions"
    message = f"the search ({policy}) stopped by {stop_reason} before any reply was finished: {why}"
    return ApiError(504, code, message, headers=NO_RETRY)


def shutting_down(retry_after: int) -> ApiError:
    """The ApiError (503) of a server that is shutting down; another server may take the request."""
    headers = {"retry-after": str(retry_after)}
    return ApiError(503, "shutting_down", "this server is shutting down", headers=headers)


def internal_error() -> ApiError:
    """The ApiError (500) for an unforeseen exception, whose text is in the log only."""
    message = "internal error; the server's log has it under this request's x-request-id"
    return ApiError(500, "internal_error", message)


def translate(error: Exception, retry_after: int) -> ApiError:
    """Turn any exception into an ApiError; the text of an unforeseen one is not sent to clients."""
    retry_headers = {"retry-after": str(retry_after)}
    match error:
        case ApiError():
            return error
        case EngineDown():
            return ApiError(503, "engine_unavailable", str(error), headers=retry_headers)
        case KvFull():
            return ApiError(503, "kv_full", str(error), headers=retry_headers)
        case PrefixTooLong():
            message = f"{error} (the maximum context length and the KV budget bound a prompt)"
            return ApiError(400, "context_length_exceeded", message, param="messages")
        case Deleted():
            message = "the search was deleted while it ran"
            return ApiError(409, "search_cancelled", message, headers=NO_RETRY)
        case Stopped():
            return shutting_down(retry_after)
        case RewardMissing():
            return ApiError(500, "reward_missing", str(error), headers=NO_RETRY)
        case VerifierFailed():
            return ApiError(500, "verifier_failed", str(error), headers=NO_RETRY)
        case EngineError():
            return ApiError(500, "engine_error", str(error), headers=NO_RETRY)
        case RequestValidationError():
            return _from_validation(error)
        case StarletteHTTPException():
            return _from_http(error)
    return internal_error()


def unforeseen(error: Exception) -> bool:
    """Whether an exception is this server's own fault, so that it must be logged."""
    return translate(error, 0).code == "internal_error"


def install(app: FastAPI, retry_after: int) -> None:
    """Have every foreseen error answered in OpenAI's shape, unknown routes included."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        reply = translate(error, retry_after)
        headers = dict(reply.headers or {})
        if reply.status_code == METHOD_NOT_ALLOWED:
            headers.pop("Allow", None)  # Starlette lists the methods of one route only
            headers["allow"] = ", ".join(_methods(request))
        return JSONResponse(reply.body(), reply.status_code, headers)

    for kind in (StarletteHTTPException, RequestValidationError, EngineError, Deleted, Stopped):
        app.add_exception_handler(kind, answer)


def _methods(request: Request) -> list[str]:
    """The methods of a path: several routes may share it, and each knows only its own methods."""
    keys = ("type", "path", "root_path", "headers")
    scope = {name: request.scope[name] for name in keys if name in request.scope}
    return [
        method
        for method in METHODS
        if any(r.matches(scope | {"method": method})[0] is Match.FULL for r in request.app.routes)
    ]


def echo(value: object) -> str:
    """A client's value quoted for an error message, in at most LONGEST_ECHO characters."""
    if isinstance(value, str | list):
        value = value[:LONGEST_ECHO]
    text = repr(value)
    return text if len(text) <= LONGEST_ECHO else text[: LONGEST_ECHO - 3] + "..."


def field_name(loc: tuple[int | str, ...]) -> str:
    """``("body", "messages", 0, "role")`` as ``messages[0].role``."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "body" or name:
            name += f".{part}" if name else part
    return name


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        why = first.get("ctx", {}).get("error", "malformed")
        message = f"the body is not valid JSON: {why} at character {at}"
        return ApiError(400, "invalid_json", message)
    name = field_name(first["loc"])
    if not name:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        if first["type"] == "value_error":
            message = f"the body: {first['ctx']['error']}"
        return ApiError(400, "invalid_body", message)
    if first["type"] == "missing":
        return ApiError(400, "missing_required_parameter", f"{name}: required", param=name)
    if first["type"] == "extra_forbidden":
        of_search = name.startswith("search.")
        names = f"; known are {', '.join(SearchSpec.model_fields)}" if of_search else ""
        message = f"{name}: there is no such field{names}"
        return ApiError(400, "unknown_parameter", message, param=name)
    reply = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return bad_value(name, f"{reply}, got {echo(first['input'])}")


def _from_http(error: StarletteHTTPException) -> ApiError:
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    messages = {
        404: "there is no such route",
        405: "this route does not take that method",
        400: "the body could not be read as JSON",
    }
    status = error.status_code
    code = codes.get(status, "bad_request" if status < 500 else "internal_error")
    message = messages.get(status, HTTPStatus(status).phrase)
    return ApiError(status, code, message, headers=error.headers)
