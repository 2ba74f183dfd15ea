"""Bodies that schemathesis makes of the server's own document: as it says, and against it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from loadtest.hostile.history import DOCUMENTED, StageHistory
from loadtest.served import Served

SECONDS = 30.0
"""For an answer."""
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance")


def by_document(kept: StageHistory, examples: int) -> dict[str, Any]:
    """So many of each operation; what came out, with the statuses that the server logged."""
    if kept.facts:
        return kept.facts
    statuses: Counter[int] = Counter()

    def heard(line: str) -> None:
        if '"hedgerow.access"' in line:
            statuses[json.loads(line)["status"]] += 1

    settings = {"log_format": "json", "max_width": 8, "max_depth": 6, "deadline_seconds": 5}
    with Served(heard=heard, **settings) as served:
        before = served.engine
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
                *("--mode", "all", "--max-examples", str(examples), "--workers", "4"),
                *("--checks", ",".join(CHECKS), "--request-timeout", str(SECONDS), "--seed", "1"),
                *("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-color"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        deaths = int(served.engine != before)
    broken = {
        "undocumented_5xx": sum(
            n for status, n in statuses.items() if status >= 500 and status not in DOCUMENTED
        ),
        "engine_deaths": deaths,
    }
    kept.note(
        requests=sum(statuses.values()),
        statuses=dict(sorted(statuses.items())),
        summary=ran.stdout[ran.stdout.find("Test cases:") :].split("\n")[1].strip(),
        broken={name: count for name, count in broken.items() if count},
    )
    return kept.facts
