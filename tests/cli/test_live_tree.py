"""The tree in a terminal: what is drawn, and what is left out if there is no room."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.live_tree import LiveTree


def expansion(number: int, node: int, parent: int, text: str) -> dict[str, Any]:
    """Return the event of a step of eight tokens."""
    step = {"node": node, "parent": parent, "text": text, "tokens": [1] * 8}
    return {"event": "expanded", "round": number} | step


EVENTS: list[dict[str, Any]] = [
    expansion(1, 1, 0, "first [step]\n\n"),
    {"event": "scored", "round": 1, "node": 1, "reward": 0.25},
    expansion(1, 2, 0, "second\n\n"),
    {"event": "pruned", "round": 2, "node": 2, "reason": "policy"},
    expansion(2, 3, 1, "The answer is 1."),
    {"event": "finished", "round": 2, "node": 3, "finish": "end", "tokens": 9},
    {"event": "answer", "node": 3, "answer": "1"},
]


def draw(events: list[dict[str, Any]], height: int = 24) -> str:
    """Return the tree after these events, rendered as text."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=height)
    with LiveTree(console, "What is it?") as live:
        for event in events:
            live.on_event(event)
        plain = Console(width=60, height=height, record=True, file=io.StringIO())
        plain.print(live.render())
        return plain.export_text()


def test_steps_hang_below_their_parents_with_their_rewards() -> None:
    """Steps are indented under their parent; brackets in a step are text, not markup."""
    lines = [line.rstrip() for line in draw(EVENTS).splitlines()]
    assert lines == [
        "What is it?",
        "├── 0.25 first [step]",
        "│   └── The answer is 1. ●",
        "└── × second",
        "round 2: 3 steps, 1 finished",
    ]


def test_kv_is_told_beside_the_steps_and_below_the_tree() -> None:
    """Shows what was evicted of a live step, what came back this round, and the total held."""
    evicted = {"event": "evicted", "round": 2, "node": 1, "kept": 3, "reason": "room"}
    kv = {"event": "kv", "round": 2, "active_tokens": 5, "inactive_tokens": 7}
    lines = [line.rstrip() for line in draw([*EVENTS[:4], evicted, kv]).splitlines()]
    assert lines[1] == "├── 0.25 first [step] 3/8 KV"
    assert lines[3] == "round 2: 2 steps, 0 finished; KV 12 tokens, 5 of them active"
    rehydrated = {"event": "rehydrated", "round": 3, "node": 1, "kept": 8}
    selected = {"event": "selected", "round": 3, "node": 1, "children": 2}
    assert "first [step] ↻" in draw([*EVENTS[:4], evicted, selected, rehydrated])
    selected_later = {"event": "selected", "round": 5, "node": 1, "children": 1}
    assert "↻" not in draw([*EVENTS[:4], evicted, rehydrated, selected_later])


def test_a_tall_tree_is_cut_and_keeps_the_chosen_path() -> None:
    """Only lines that fit are drawn; the chosen path stays, omitted steps are counted."""
    steps = [expansion(1, n, 0, f"step {n}") for n in range(1, 101)]
    answer_events: list[dict[str, Any]] = [
        expansion(2, 101, 100, "The answer is 1."),
        {"event": "answer", "node": 101, "answer": "1"},
    ]
    text = draw(steps + answer_events, height=14)
    assert len(text.splitlines()) <= 14
    assert "The answer is 1." in text
    assert "more steps" in text


def test_without_a_terminal_every_event_is_a_line() -> None:
    """Into a log or a pipe every event is written as a line."""
    console = Console(file=io.StringIO(), width=200)
    with LiveTree(console, "?") as live:
        for event in EVENTS:
            live.on_event(event)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "round 1: step 1 below 0: first [step]",
        "round 1: step 1 scores 0.2500",
        "round 1: step 2 below 0: second",
        "round 2: step 2 pruned",
        "round 2: step 3 below 1: The answer is 1.",
        "round 2: step 3 finished",
    ]


def test_a_picture_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """The SVG holds the steps and loads no font or image."""
    live = LiveTree(Console(file=io.StringIO()), "What is it?")
    for event in EVENTS:
        live.on_event(event)
    live.save_picture(tmp_path / "tree.svg", "rebase")
    svg = (tmp_path / "tree.svg").read_text()
    assert "first" in svg
    assert "url(" not in svg.replace("url(#", "")
