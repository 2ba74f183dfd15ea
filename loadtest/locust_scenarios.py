"""Locust's users, a class per scenario: `locust -f loadtest/locust_scenarios.py --host URL Steady`.

Where ``LOADTEST_RECORDS`` names a file, every request is written there as a line of JSON: when it
ended, by which key, its milliseconds, its status (0: no whole answer), and its ``Retry-After``, if
any. ``LOADTEST_PERIOD``: seconds between the requests of one ``Paced`` user.
`python -m loadtest.scenarios` runs the others and makes the report.
"""

from __future__ import annotations

import json
import os
import random
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from locust import FastHttpUser, constant, constant_throughput, events, task

from models.tasks import TASKS

CHAT = "/v1/chat/completions"
QUESTIONS = TASKS["game24"].questions("dev", 64)
BURST_SECONDS = 5.0
WIDTHS = {1: 8, 4: 4, 16: 2, 64: 1}
"""The relative frequency of each width."""
RECORDS = os.environ.get("LOADTEST_RECORDS")
PERIOD = float(os.environ.get("LOADTEST_PERIOD", "0"))


class Asker(FastHttpUser):
    """Asks for plain replies and small searches, one after the other."""

    abstract = True
    key = "honest"
    network_timeout = 300.0

    @task
    def ask(self) -> None:
        """One request of the scenario's kind."""
        question = random.choice(QUESTIONS)
        body: dict[str, Any] = {"model": "sprig", "seed": random.getrandbits(32)}
        body["messages"] = [{"role": "user", "content": question}]
        headers = {"authorization": f"Bearer {self.key}"}
        self.send(body | self.request_fields(), headers)

    def send(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Ask, and wait for the answer."""
        self.client.post(CHAT, json=body, headers=headers, name=self.key)

    def request_fields(self) -> dict[str, Any]:
        """The fields of the request beside the question."""
        return {"search": {"width": 4}} if random.random() < 0.5 else {"max_tokens": 32}


class Steady(Asker):
    """An even rate: one request in two seconds per user."""

    wait_time = constant_throughput(0.5)


class Burst(Asker):
    """All users at the same moment, again and again."""

    def wait_time(self) -> float:
        """Seconds to the next burst."""
        return BURST_SECONDS - time.time() % BURST_SECONDS


class MixedWidths(Asker):
    """Searches of widths 1 to 64, the wide ones rare."""

    wait_time = constant_throughput(0.5)

    def request_fields(self) -> dict[str, Any]:
        """A random width, by ``WIDTHS``."""
        (width,) = random.choices(list(WIDTHS), list(WIDTHS.values()))
        return {"search": {"width": width}}


class LongTails(Asker):
    """Lengths and widths with a heavy tail: most requests are small, a few are very large."""

    wait_time = constant_throughput(0.5)

    def request_fields(self) -> dict[str, Any]:
        """A size from a bounded Pareto distribution of shape 1.2."""
        size = random.paretovariate(1.2)
        if random.random() < 0.5:
            return {"max_tokens": min(256, int(8 * size))}
        return {"search": {"width": min(64, int(2 * size))}}


class Abused(Asker):
    """Steady users, beside whom another key asks without end."""

    weight = 3
    wait_time = constant_throughput(0.5)


class Abuser(Asker):
    """Users of the key that asks without end, for wide searches."""

    weight = 1
    key = "abusive"
    wait_time = constant(0)

    def request_fields(self) -> dict[str, Any]:
        """The widest search."""
        return {"search": {"width": 64}}


class Paced(Asker):
    """Asks once a period from a random moment on; without a period, again at once."""

    abstract = True

    def on_start(self) -> None:
        """Wait for a random moment within the period."""
        wait = random.uniform(0.0, PERIOD)
        self.due = time.time() + wait
        time.sleep(wait)

    def wait_time(self) -> float:
        """Seconds to the next request."""
        self.due += PERIOD
        return max(0.0, self.due - time.time())


class Plain(Paced):
    """Short plain completions."""

    def request_fields(self) -> dict[str, Any]:
        """A limit of sixteen tokens."""
        return {"max_tokens": 16}


class Mixture(Paced):
    """Plain replies and searches, one in five of them streamed."""

    weight = 9

    def request_fields(self) -> dict[str, Any]:
        """A plain reply or a search, at random."""
        return {"max_tokens": 48} | ({"search": {"width": 4}} if random.random() < 0.5 else {})

    def send(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Ask, one time in five for a stream, which fails without its last event."""
        if random.random() < 0.8:
            super().send(body, headers)
            return
        how: dict[str, Any] = {"headers": headers, "catch_response": True, "name": self.key}
        with self.client.post(CHAT, json=body | {"stream": True}, **how) as answer:
            if answer.ok and not (answer.content or b"").rstrip().endswith(b"data: [DONE]"):
                answer.failure("cut")


class Leaver(Mixture):
    """Clients that leave midway."""

    weight = 1
    key = "leaver"

    def __init__(self, environment: Any) -> None:
        """Choose a random timeout."""
        self.network_timeout = random.uniform(0.01, 0.5)
        super().__init__(environment)


@events.request.add_listener
def record(
    name: str, response_time: float, response: Any, exception: Exception | None, **_: Any
) -> None:
    """Write a request's line."""
    if RECORDS is not None:
        cut = exception is not None and response.status_code == HTTPStatus.OK
        line = {"ended": time.time(), "key": name, "ms": response_time}
        line["status"] = 0 if cut else response.status_code
        line["retry_after"] = (response.headers or {}).get("retry-after")
        with Path(RECORDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
