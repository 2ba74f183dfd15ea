"""What can harm another's search? `python -m loadtest.hostile [--quick] [--state FOLDER] [--json]`.

The bundled models behind servers that it starts; status 1 if a promise is broken. What is done
stands in the folder, so that a run that was cut off goes on from there; the whole takes about 90
minutes on two cores, ``--quick`` 10. ``--stage`` runs some of them alone.

- ``bodies``: cut, bent and random ones over raw sockets; ``documents``: schemathesis' own;
- ``leavers``: clients that leave at random moments; ``half_bodies``, ``big_bodies``: as named;
- ``pairs``: random searches, each asked twice, of servers with other company and other settings;
- ``kills``: searches while the engine is killed and stopped, and all of them again in peace;
- ``disk``: no room for the file of trees;
- ``wires``, ``openai_wires``: faults between the server and stubs of SGLang or of vLLM, and
  ``real_wires`` SGLang itself, where ``make sglang-env`` has been run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.hostile.bodies import bad_bodies, by_document, checked_bodies
from loadtest.hostile.door import big_bodies, checked_big, checked_halves, half_bodies
from loadtest.hostile.history import StageHistory, checked
from loadtest.hostile.leavers import checked_leavers, leavers
from loadtest.hostile.searches import checked_disk, full_disk, killed, pairs
from loadtest.hostile.wire import checked_wires, wires
from loadtest.on_sglang import PYTHON
from loadtest.options import BenchmarkParser, listed
from loadtest.report import publish, say

Stage = Callable[[StageHistory, int], dict[str, Any]]
STAGES: dict[str, tuple[Stage, int, int]] = {
    "bodies": (lambda kept, n: checked_bodies(bad_bodies(kept, n), kept.facts), 20_000, 2_000),
    "documents": (by_document, 60, 5),
    "leavers": (lambda kept, n: checked_leavers(leavers(kept, n), kept.facts), 2_000, 200),
    "half_bodies": (lambda kept, n: checked_halves(half_bodies(kept, n), kept.facts), 1_100, 600),
    "big_bodies": (lambda kept, n: checked_big(big_bodies(kept, n), kept.facts), 20, 5),
    "disk": (lambda kept, n: checked_disk(full_disk(kept, n), kept.facts), 50, 10),
    "wires": (lambda kept, n: checked_wires(wires(kept, n), kept.facts), 300, 30),
    "openai_wires": (
        lambda kept, n: checked_wires(wires(kept, n, "openai"), kept.facts),
        300,
        30,
    ),
    "real_wires": (
        lambda kept, n: checked_wires(wires(kept, n, real=True), kept.facts) if n else {},
        30,
        0,
    ),
    "kills": (lambda kept, n: checked(killed(kept, n, n // 15)), 300, 45),
    "pairs": (lambda kept, n: checked(pairs(kept, n)), 1_050, 30),
}
"""What a stage does, and how often: at length and quickly."""


def measure(folder: Path, names: list[str], quick: bool) -> list[dict[str, Any]]:
    """A row a stage."""
    rows = []
    for name in names:
        stage, full, few = STAGES[name]
        count = few if quick else full
        if not count or (name == "real_wires" and not PYTHON.is_file()):
            continue
        say(f"{name}: {count}")
        begun = time.monotonic()
        found = stage(StageHistory(folder, name), count)
        rest = {key: value for key, value in found.items() if key not in COLUMNS}
        rows.append(
            {"stage": name, "requests": found["requests"], "broken": found["broken"] or "nothing"}
            | {"found": rest, "seconds": round(time.monotonic() - begun)}
        )
    return rows


COLUMNS = ("stage", "requests", "broken", "found", "seconds")


def main() -> None:
    """Run what is not done yet and say what came out."""
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
