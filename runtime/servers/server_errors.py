"""What may be wrong with a server, and what it says when it refuses."""

from __future__ import annotations

import httpx

from search.engine import EngineDown

TOO_MANY = 429
FULL = frozenset({TOO_MANY, 503})
"""Statuses of a server that has not begun the request: it may be sent again."""
NOT_FOUND = 404
KEY_NEEDED = frozenset({401, 403})
CUT_OFF = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""A connection ended before an answer."""
MESSAGE_LETTERS = 200


class ReplicaLost(EngineDown):
    """A server does not answer any more, or is at fault; another one may answer.

    ``answered``: it gave an answer, which says that it is at fault.
    """

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class WrongServer(ValueError):
    """A server is not the one that is needed; names both sides and the cure."""


def refusal_message(response: httpx.Response) -> str:
    """The message of a refusal."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code} {response.text[:MESSAGE_LETTERS]}".rstrip()
