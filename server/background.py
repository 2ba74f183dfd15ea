"""Searches that go on without their client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

from server.admission import Ticket
from server.ask import Ask
from server.errors import translate
from server.feed import Feed
from server.service import Service

log = logging.getLogger("hedgerow.background")


def in_background(
    work: Coroutine[Any, Any, Any], ask: Ask, service: Service, ticket: Ticket, feed: Feed
) -> None:
    """Run ``work`` to its end; what goes wrong is kept under its id and told its readers."""
    task = service.forest.start(work, ticket, kept=True)
    service.store.begin(ask.id, ask.key.name, ask.created, ticket, feed)

    def end(task: asyncio.Task[Any]) -> None:
        error = service.forest.cancelled() if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, Exception):
            raise error
        said = translate(error, service.settings.retry_after_seconds)
        if said.code == "internal_error":
            log.error("a background search failed", exc_info=error)
        feed.add("error", said.body(), last=True)
        failed = {"id": ask.id, "object": "search", "created": ask.created, "status": "failed"}
        service.store.finish(ask.id, json.dumps(failed | said.body()).encode())

    task.add_done_callback(end)
