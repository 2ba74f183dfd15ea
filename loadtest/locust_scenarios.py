"""Locust's users: one class a scenario. `locust -f loadtest/locust_scenarios.py --host URL Steady`.

Where ``LOADTEST_RECORDS`` names a file, every request is written there as a line of JSON: when it
ended, by which key, its milliseconds, its status (0: no answer). `python -m loadtest.scenarios`
runs them all and makes the report.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, constant, constant_throughput, events, task

from models.tasks import TASKS

CHAT = "/v1/chat/completions"
QUESTIONS = TASKS["game24"].questions("dev", 64)
PERIOD = 5.0
"""Seconds between bursts."""
WIDTHS = {1: 8, 4: 4, 16: 2, 64: 1}
"""How often each width is asked for."""
RECORDS = os.environ.get("LOADTEST_RECORDS")


class Asker(HttpUser):
    """Asks for plain replies and small searches, one after the other."""

    abstract = True
    key = "honest"

    @task
    def ask(self) -> None:
        """One request of the scenario's kind."""
        question = random.choice(QUESTIONS)
        body: dict[str, Any] = {"model": "sprig", "seed": random.getrandbits(32)}
        body["messages"] = [{"role": "user", "content": question}]
        headers = {"authorization": f"Bearer {self.key}"}
        self.client.post(CHAT, json=body | self.wanted(), headers=headers, name=self.key)

    def wanted(self) -> dict[str, Any]:
        """What is asked for beside the question."""
        return {"search": {"width": 4}} if random.random() < 0.5 else {"max_tokens": 32}


class Steady(Asker):
    """An even rate: one request in two seconds a user."""

    wait_time = constant_throughput(0.5)


class Burst(Asker):
    """All users at the same moment, again and again."""

    def wait_time(self) -> float:
        """Seconds to the next burst."""
        return PERIOD - time.time() % PERIOD


class MixedWidths(Asker):
    """Searches of widths 1 to 64, the wide ones rare."""

    wait_time = constant_throughput(0.5)

    def wanted(self) -> dict[str, Any]:
        """A width by its weight."""
        (width,) = random.choices(list(WIDTHS), list(WIDTHS.values()))
        return {"search": {"width": width}}


class LongTails(Asker):
    """Lengths and widths with a heavy tail: most requests are small, a few are very large."""

    wait_time = constant_throughput(0.5)

    def wanted(self) -> dict[str, Any]:
        """Pareto with shape 1.2, bounded."""
        size = random.paretovariate(1.2)
        if random.random() < 0.5:
            return {"max_tokens": min(256, int(8 * size))}
        return {"search": {"width": min(64, int(2 * size))}}


class Abused(Asker):
    """The same steady users as ever, beside whom somebody's key asks without end."""

    weight = 3
    wait_time = constant_throughput(0.5)


class Abuser(Asker):
    """The key that asks without end, and widely."""

    weight = 1
    key = "abusive"
    wait_time = constant(0)

    def wanted(self) -> dict[str, Any]:
        """As much as it may."""
        return {"search": {"width": 64}}


@events.request.add_listener
def record(name: str, response_time: float, response: Any, **_: Any) -> None:
    """Write a request's line."""
    if RECORDS is not None:
        status = 0 if response is None else response.status_code
        line = {"ended": time.time(), "key": name, "ms": response_time, "status": status}
        with Path(RECORDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
