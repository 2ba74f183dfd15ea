"""Errors of servers, and the messages of their refusals."""

from __future__ import annotations

import httpx

from search.engine import EngineDown

TOO_MANY = 429
FULL = frozenset({TOO_MANY, 503})
"""Statuses of a full server, which has not begun the request: it may be sent again."""
NOT_FOUND = 404
KEY_NEEDED = frozenset({401, 403})
CUT_OFF = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""Errors of a connection that ended before an answer."""
MESSAGE_LETTERS = 200


class ReplicaLost(EngineDown):
    """A server does not answer any more, or is at fault; another one may answer.

    ``suspect``: the request itself may be the reason: its answer was a server fault, or did not
    come in the time for one.
    """

    def __init__(self, message: str, *, suspect: bool = False) -> None:
        super().__init__(message)
        self.suspect = suspect


class WrongServer(ValueError):
    """A server is not the one needed; the message names the difference and the remedy."""


def refusal_message(response: httpx.Response) -> str:
    """The message in a refusal's body; without one its status and first characters."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code} {response.text[:MESSAGE_LETTERS]}".rstrip()
