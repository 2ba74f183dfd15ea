"""``hedgerow replay``: grows recorded trees again and compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from cli.solve import SHORT_DIGEST, SearchClient, search_client
from search.spec import RequestedSearch
from search.tree import Node, Tree
from search.tree_json import from_json
from server.api_errors import field_name
from server.request_models import Message, SearchRequest
from server.settings import Settings


class RecordError(ValueError):
    """The file has no search that can be grown again; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded search: its request, the tree's digest, and the tree if it was recorded."""

    request: SearchRequest
    digest: str
    fingerprint: str | None
    tree: Tree | None


def read_records(path: Path) -> list[Record]:
    """Read the searches of a file: one response, or the lines that ``--trees`` writes.

    Raises RecordError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    try:
        documents = [json.loads(text)]
    except json.JSONDecodeError:
        documents = [_document(line, path) for line in text.splitlines() if line.strip()]
    if not documents:
        raise RecordError(f"{path}: empty")
    return [_record(document, path) for document in documents]


async def replay(record: Record, client: SearchClient) -> dict[str, Any]:
    """Grow a recorded search again; return both digests and, if the tree was recorded, the first
    node that differs. Raises ClientError if the search fails."""
    document = await client(record.request, lambda _: None)
    same, difference = document["tree_digest"] == record.digest, None
    if not same and record.tree is not None:
        difference = first_difference(record.tree, from_json(document["tree"]))
    return {
        "recorded": record.digest,
        "replayed": document["tree_digest"],
        "same_configuration": record.fingerprint in (None, document["system_fingerprint"]),
        "difference": difference,
        "same": same,
    }


def first_difference(recorded: Tree, replayed: Tree) -> str:
    """Describe the first node, in id order, that differs between the trees."""
    if recorded.prompt != replayed.prompt:
        return "the prompts differ"
    for old, new in zip(recorded.nodes, replayed.nodes, strict=False):
        for name in ("parent", "tokens", "finish", "reward", "state"):
            before, after = getattr(old, name), getattr(new, name)
            if before != after:
                return f"node {old.id}, {name}: {_text(old, name)} before, {_text(new, name)} now"
    if len(recorded) != len(replayed):
        node = min(len(recorded), len(replayed))
        return f"node {node}: one tree has {len(recorded)} nodes, the other {len(replayed)}"
    return "the nodes are the same; the answers differ"


def _text(node: Node, name: str) -> str:
    return repr(node.text) if name == "tokens" else repr(getattr(node, name))


def _document(line: str, path: Path) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: neither JSON nor JSON lines: {error}") from error


def _record(document: Any, path: Path) -> Record:
    """Parse a chat completion with a ``search`` object, or a document of ``/v1/search``."""
    if not isinstance(document, dict):
        raise RecordError(f"{path}: must hold a JSON object")
    search = document.get("search", document)
    missing = [k for k in ("spec", "messages", "tree_digest") if k not in (search or {})]
    if missing:
        raise RecordError(f"{path}: not the response of a search; missing: {', '.join(missing)}")
    if "branched_from" in search:
        raise RecordError(f"{path}: the search went on from another one's node; replay that one")
    try:
        request = SearchRequest(
            messages=[Message(**message) for message in search["messages"]],
            search=RequestedSearch(**search["spec"]),
        )
        tree = from_json(document["tree"]) if "tree" in document else None
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{error.title}.{field_name(first['loc'])}"
        raise RecordError(f"{path}: {where} = {first['input']!r}: {first['msg']}") from error
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: {error}") from error
    return Record(request, search["tree_digest"], document.get("system_fingerprint"), tree)


async def replay_all(
    records: Sequence[Record], settings: Settings, console: Console, url: str | None
) -> list[dict[str, Any]]:
    """Replay all records in turn, printing a line for each; return a row for each."""
    rows = []
    async with search_client(settings, url, console) as client:
        for number, record in enumerate(records, 1):
            row = await replay(record, client)
            verdict = "same tree" if row["same"] else "another tree"
            console.print(f"{number}: {verdict}, {row['replayed'][:SHORT_DIGEST]}", highlight=False)
            if not row["same"]:
                console.print(f"   recorded {row['recorded'][:SHORT_DIGEST]}", highlight=False)
                difference = row["difference"] or "unknown, no tree was recorded"
                console.print(f"   first difference: {difference}", markup=False)
                if not row["same_configuration"]:
                    console.print("   the configuration differs: see system_fingerprint")
            rows.append(row)
    return rows
