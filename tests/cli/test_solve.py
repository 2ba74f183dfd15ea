"""What ``hedgerow solve`` prints once a search is done."""

from __future__ import annotations

import io

from rich.console import Console

from cli.solve import show


def test_a_long_answer_leaves_room_for_its_votes() -> None:
    """Each answer has its number of votes, its weight, and a bar as long as its weight."""
    answers = [
        {"answer": "9 - 3 = 6; " * 20, "count": 3, "weight": 2.0, "reply": 1},
        {"answer": "7", "count": 12, "weight": 1.0, "reply": 2},
    ]
    stats = {"rounds": 2, "nodes": 9, "generated_tokens": 80, "seconds": 0.5}
    document = {"text": "so", "vote": "majority", "answers": answers, "unanswered": 0}
    document |= {"policy": "rebase", "width": 4, "seed": 1, "stop_reason": "answered"}
    document |= {"tree_digest": "0" * 64, "stats": stats}
    console = Console(file=io.StringIO(), width=80, record=True)
    show(document, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines[:-1])) <= 80
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    assert [row[2:5] for row in rows] == [["3", "2.0000", "█" * 12], ["12", "1.0000", "█" * 6]]
