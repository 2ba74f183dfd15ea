"""Record from a server the searches that the playground shows before it asks anything.

`python -m loadtest.playground_recordings http://127.0.0.1:8000 > server/playground/recorded.json`;
again whenever the bundled models change. Each event keeps the moment at which it came.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import httpx
import httpx_sse

from models.tasks import TASKS

SEARCHES = {
    "game24": {"policy": "rebase", "width": 16, "seed": 7},
    "blocksworld": {"policy": "ets", "width": 12, "seed": 3},
    "wordproblem": {"policy": "rebase", "width": 12, "seed": 5},
}
"""The search of each task."""
QUESTION = 2
"""The index of the question among a task's dev questions."""
DONE = ("object", "status", "answer", "answers", "unanswered", "text", "vote", "seed", "policy",
        "width", "stop_reason", "usage", "stats")  # fmt: skip
"""Fields of the last event that the page reads."""


def recorded(url: str, task: str) -> dict[str, Any]:
    """Record one search: its question, title and events, each `[milliseconds, name, data]`."""
    question, search = TASKS[task].questions("dev", QUESTION + 1)[QUESTION], SEARCHES[task]
    body = {"question": question, "search": search, "stream": True}
    events: list[list[Any]] = []
    with httpx.Client(base_url=url, timeout=600.0, trust_env=False) as client:
        start = time.monotonic()
        with httpx_sse.connect_sse(client, "POST", "/v1/search", json=body) as source:
            for event in source.iter_sse():
                data = event.json()
                names = DONE if event.event == "done" else data.keys() - {"event", "id"}
                data = {name: value for name, value in data.items() if name in names}
                events.append([round((time.monotonic() - start) * 1000), event.event, data])
    title = f"{search['policy']} {search['width']}, seed {search['seed']}"
    return {"task": task, "title": title, "question": question, "events": events}


def main() -> None:
    """Print the recordings as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    url = parser.parse_args().url
    print(json.dumps([recorded(url, task) for task in SEARCHES], separators=(",", ":")))


if __name__ == "__main__":
    main()
