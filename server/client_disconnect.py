"""A client that leaves takes along whatever its request is doing just then."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_errors import ClientLeft

T = TypeVar("T")


async def while_connected(
    app: ASGIApp, scope: Scope, unread: list[bytes], receive: Receive, send: Send
) -> None:
    """Have ``app`` answer a request whose body is whole, and cancel it when the client leaves.

    ``unread``: the body, which is taken out when it is read.

    Raises ClientLeft then; otherwise what the app raises.
    """
    answered = False
    left = asyncio.create_task(_left(receive))

    async def receive_rest() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.wait({left})
        return {"type": "http.disconnect"}

    async def send_noted(message: Message) -> None:
        nonlocal answered
        await send(message)
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)

    task = asyncio.ensure_future(app(scope, receive_rest, send_noted))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        too_soon = not (task.done() or answered)  # servers tell of a disconnect after an answer too
        if not too_soon:
            await asyncio.wait({task})
    finally:
        left.cancel()
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    if too_soon:
        raise ClientLeft


def forget_body(request: Request) -> None:
    """What was sent has been understood: while the request waits, its bytes need not."""
    request._body = b""


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
