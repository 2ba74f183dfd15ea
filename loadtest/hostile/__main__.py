"""What can harm another's search? `python -m loadtest.hostile [--quick] [--state FOLDER] [--json]`.

The bundled models behind servers that it starts; status 1 if a promise is broken. What is done
is kept in the folder, so that an interrupted run goes on from there; the whole takes about 90
minutes on two cores, ``--quick`` 10. ``--stage`` runs some of them alone.

- ``bodies``: cut, altered and random ones over raw sockets;
- ``leavers``: clients that leave at random moments; ``half_bodies``, ``big_bodies``: as named;
- ``pairs``: random searches, each run twice, on servers with other load and other settings;
- ``kills``: searches while the engine is killed and stopped, and all of them again undisturbed;
- ``disk``: no room for the file of trees;
- ``wires``, ``openai_wires``: faults between the server and stubs of SGLang or of vLLM, and
  ``real_wires`` SGLang itself, where ``make sglang-env`` has been run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.hostile.bodies import bad_bodies, checked_bodies
from loadtest.hostile.door import big_bodies, checked_big, checked_halves, half_bodies
from loadtest.hostile.history import Asked, StageHistory, checked
from loadtest.hostile.leavers import checked_leavers, leavers
from loadtest.hostile.searches import checked_disk, full_disk, killed, pairs
from loadtest.hostile.wire import checked_wires, wires
from loadtest.on_sglang import PYTHON
from loadtest.options import BenchmarkParser, listed
from loadtest.report import publish, say

Stage = Callable[[StageHistory, int], list[Asked]]
Check = Callable[[list[Asked], dict[str, Any]], dict[str, Any]]
STAGES: dict[str, tuple[Stage, Check, int, int]] = {
    "bodies": (bad_bodies, checked_bodies, 20_000, 2_000),
    "leavers": (leavers, checked_leavers, 2_000, 200),
    "half_bodies": (half_bodies, checked_halves, 1_100, 600),
    "big_bodies": (big_bodies, checked_big, 20, 5),
    "disk": (full_disk, checked_disk, 50, 10),
    "wires": (wires, checked_wires, 300, 30),
    "openai_wires": (partial(wires, engine="openai"), checked_wires, 300, 30),
    "real_wires": (partial(wires, real=True), checked_wires, 30, 0),
    "kills": (killed, lambda history, _: checked(history), 300, 45),
    "pairs": (pairs, lambda history, _: checked(history), 1_050, 30),
}
"""Of each stage: what runs, what checks it, and its number of cases in full and quickly."""


PLACED_FACTS = ("requests", "broken")
"""Facts of a stage that its row has in other columns than ``found``."""
COLUMNS = ("kind", "cases", "broken", "found", "seconds")


def measure(folder: Path, names: list[str], quick: bool) -> list[dict[str, Any]]:
    """Run the stages; a row for each."""
    rows = []
    for name in names:
        stage, check, full, few = STAGES[name]
        count = few if quick else full
        if not count or (name == "real_wires" and not PYTHON.is_file()):
            continue
        say(f"{name}: {count}")
        start, store = time.monotonic(), StageHistory(folder, name)
        history = stage(store, count)
        rows.append(row(name, check(history, store.facts)))
        rows[-1]["seconds"] = round(time.monotonic() - start)
    return rows


def row(stage: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A stage's row. ``broken``: how often a promise was broken, by name, or "nothing"; ``wrong``:
    pairs whose trees differ, and trees whose tokens are not those billed."""
    counts = Counter(facts["broken"])
    return {
        "kind": stage,
        "cases": facts["requests"],
        "errors_5xx": counts["undocumented_5xx"],
        "engine_deaths": counts["engine_deaths"],
        "hung": counts["hung"] + counts["half_bodies_without_an_end"],
        "over_places": counts["searches_over_max_running"],
        "gone_p99_ms": facts.get("gone_p99_ms"),
        "lost": counts["lost"],
        "wrong": counts["digests_differ"] + counts["billed_is_not_drawn"],
        "broken": {name: times for name, times in counts.items() if times} or "nothing",
        "found": {name: value for name, value in facts.items() if name not in PLACED_FACTS},
    }


def main() -> None:
    """Run what is not done yet and print the rows; exit with 1 if a promise is broken."""
    parser = BenchmarkParser("hostile", __doc__, quick="ten minutes of all of it")
    parser.add_argument("--stage", type=listed(str, STAGES), default=list(STAGES))
    parser.add_argument("--state", type=Path, help="a folder; by default a new one")
    args = parser.parse_args()
    folder = args.state or Path(tempfile.mkdtemp(prefix="hostile-"))
    say(f"what is done: {folder}")
    rows = measure(folder, args.stage, args.quick)
    publish({"state": str(folder), "rows": rows}, args.json, "A hostile run", COLUMNS)
    if any(row["broken"] != "nothing" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
