"""``hedgerow solve`` and the running half of ``hedgerow replay``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.live_tree import LiveTree
from cli.replay import Record, replay
from cli.search_client import SearchClient, local, remote
from search.spec import SearchSpec
from server.request_models import SearchRequest
from server.settings import Settings
from server.tree_log import TreeLog

SHORT_DIGEST = 16
MOST_ANSWERS = 10
BAR = 12
"""The heaviest answer's bar, in columns."""
OTHER_COLUMNS = 28
"""Of the votes, the weight and the lines of the table."""


@asynccontextmanager
async def grower(
    settings: Settings, url: str | None, console: Console, trees: TreeLog | None = None
) -> AsyncIterator[SearchClient]:
    """A grower on the server at ``url``, or on an engine started for it."""
    if url is not None:
        yield remote(url)
        return
    from server.assemble import running
    from server.service import create_service

    with console.status("loading the models"):
        parts = running(settings)
        started = await parts.__aenter__()
    try:
        yield local(
            create_service(settings, started.engine, started.text, started.delimiter, trees)
        )
    finally:
        await parts.__aexit__(None, None, None)


async def solve(
    question: str,
    spec: SearchSpec,
    settings: Settings,
    console: Console,
    trees: TreeLog,
    url: str | None,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Search, drawing the tree; print the reply and the votes; return the document.

    ``picture``: an SVG file for the tree as it stands at the end.
    """
    request = SearchRequest(question=question, search=spec)
    async with grower(settings, url, console, trees if url is None else None) as grow:
        with LiveTree(console, question) as drawing:
            document = await grow(request, drawing.hear)
    if url is not None:
        trees.write(document)
    if picture is not None:
        drawing.save_picture(picture, f"{spec.policy}, width {spec.width}, seed {document['seed']}")
    show(document, console)
    return document


def show(document: dict[str, Any], console: Console) -> None:
    """The reply, the votes and one line of numbers."""
    console.print()
    console.print(document["text"].strip(), markup=False, highlight=False)
    console.print()
    table = Table(title=f"vote: {document['vote']}")
    room = max(BAR, console.width - BAR - OTHER_COLUMNS)
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=room)
    for name in ("votes", "weight", ""):
        table.add_column(name, no_wrap=True)
    most = max((answer["weight"] for answer in document["answers"]), default=0.0)
    for answer in document["answers"][:MOST_ANSWERS]:
        bar = "█" * (round(BAR * answer["weight"] / most) if most else 0)
        weight = f"{answer['weight']:.4f}"
        table.add_row(Text(answer["answer"]), str(answer["count"]), weight, Text(bar, "green"))
    if document["answers"]:
        console.print(table)
    if len(document["answers"]) > MOST_ANSWERS:
        console.print(f"and {len(document['answers']) - MOST_ANSWERS} other answers")
    if document["unanswered"]:
        console.print(f"and {document['unanswered']} replies without an answer")
    stats = document["stats"]
    console.print(
        f"{document['policy']} {document['width']}, seed {document['seed']}: "
        f"{document['stop_reason']} after {stats['rounds']} rounds, {stats['nodes']} steps, "
        f"{stats['generated_tokens']} tokens, {stats['seconds']:.2f} s; "
        f"tree {document['tree_digest'][:SHORT_DIGEST]}",
        highlight=False,
        soft_wrap=True,
    )


async def replay_all(
    records: Sequence[Record], settings: Settings, console: Console, url: str | None
) -> list[dict[str, Any]]:
    """Replay record after record, printing a line for each; a row for each."""
    rows = []
    async with grower(settings, url, console) as grow:
        for number, record in enumerate(records, 1):
            found = await replay(record, grow)
            verdict = "same tree" if found.same else "another tree"
            console.print(f"{number}: {verdict}, {found.replayed[:SHORT_DIGEST]}", highlight=False)
            if not found.same:
                console.print(f"   recorded {found.recorded[:SHORT_DIGEST]}", highlight=False)
                difference = found.difference or "unknown, no tree was recorded"
                console.print(f"   first difference: {difference}", markup=False)
                if not found.same_configuration:
                    console.print("   the configuration differs: see system_fingerprint")
            rows.append(asdict(found) | {"same": found.same})
    return rows
