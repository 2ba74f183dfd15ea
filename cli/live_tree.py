"""Shows a growing search in a terminal as a live tree, or elsewhere as plain lines."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree as RichTree

FADED = "bright_black"
ROOT = 0
LEAST_LINES = 6
OTHER_LINES = 5
FRAMES_PER_SECOND = 8
PICTURE_COLUMNS, PICTURE_LINES = 96, 34
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@dataclass(slots=True)
class Twig:
    """What is shown of a node. ``held_tokens``: tokens of its step whose KV is held; None: all, or
    the step is dead. ``back_round``: when its KV was last rehydrated; 0: never."""

    parent: int
    text: str
    tokens: int = 0
    reward: float | None = None
    state: str = "open"
    held_tokens: int | None = None
    back_round: int = 0


class LiveTree:
    """Draws a search from its events (as dicts); use it as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._twigs = {ROOT: Twig(-1, title)}
        self._chosen_path: set[int] = set()
        self._growing_path: set[int] = set()
        self._round = 0
        self._kv: dict[str, Any] | None = None
        self._live = Live(
            console=console,
            refresh_per_second=FRAMES_PER_SECOND,
            get_renderable=self.render,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveTree:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def on_event(self, event: dict[str, Any]) -> None:
        """Apply an event to the tree; without a terminal, print it as a line."""
        self._grow(event)
        if not self._console.is_terminal:
            line = self._line(event)
            if line is not None:
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def render(self) -> RenderableType:
        """The tree, no higher than the terminal: the chosen path and living branches come first."""
        room = max(LEAST_LINES, self._console.size.height - OTHER_LINES)
        return Group(self._drawing(room), self._standing())

    def save_picture(self, path: Path, title: str) -> None:
        """Write the current tree to an SVG file that needs no external font."""
        paper = Console(
            record=True, file=io.StringIO(), width=PICTURE_COLUMNS, color_system="truecolor"
        )
        paper.print(self._drawing(PICTURE_LINES))
        svg = paper.export_svg(title=title)
        path.write_text(WEB_FONT.sub("", svg))

    def _drawing(self, room: int) -> RichTree:
        """The tree in at most ``room`` lines."""
        visible = self._visible(room)
        trunk = RichTree(self._label(ROOT), guide_style=FADED)
        branches = {ROOT: trunk}
        for node in sorted(visible - {ROOT}):
            branches[node] = branches[self._twigs[node].parent].add(self._label(node))
        hidden = len(self._twigs) - len(visible)
        if hidden:
            trunk.add(Text(f"… {hidden} more steps", style=FADED))
        return trunk

    def _visible(self, room: int) -> set[int]:
        """The at most ``room`` nodes to draw, ancestors included."""
        visible = {ROOT}
        for node in sorted(self._twigs, key=self._rank):
            path = set()
            while node not in visible:
                path.add(node)
                node = self._twigs[node].parent
            if len(visible) + len(path) <= room:
                visible |= path
        return visible

    def _rank(self, node: int) -> tuple[bool, bool, float, int]:
        twig = self._twigs[node]
        faded = twig.state == "pruned"
        return node not in self._chosen_path, faded, -(twig.reward or 0.0), node

    def _standing(self) -> Text:
        """A line with the round, the numbers of steps and finished replies, and the KV held."""
        states = [twig.state for twig in self._twigs.values()]
        line = f"round {self._round}: {len(states) - 1} steps, {states.count('finished')} finished"
        if self._kv is not None:
            active, inactive = self._kv["active_tokens"], self._kv["inactive_tokens"]
            line += f"; KV {active + inactive} tokens, {active} of them active"
        return Text(line, style=FADED)

    def _grow(self, event: dict[str, Any]) -> None:
        node: int = event.get("node") or ROOT
        number = event.get("round", self._round)
        if number != self._round:
            self._round = number
            self._growing_path.clear()
        match event["event"]:
            case "selected":
                self._activate(node)
            case "expanded":
                text = " ".join(event["text"].split()) or "(empty)"
                self._twigs[node] = Twig(event["parent"], text, len(event["tokens"]))
            case "scored":
                self._twigs[node].reward = event["reward"]
            case "finished" | "pruned":
                self._twigs[node].state = event["event"]
            case "evicted" | "rehydrated":
                dead = event.get("reason") == "dead"  # its KV is released and not shown
                self._twigs[node].held_tokens = None if dead else event["kept"]
                self._twigs[node].back_round = event["round"] * (event["event"] == "rehydrated")
            case "kv":
                self._kv = event
            case "answer" | "answered":
                self._growing_path.clear()
                while node:
                    self._chosen_path.add(node)
                    node = self._twigs[node].parent

    def _activate(self, node: int) -> None:
        """Mark the path to a node that is about to grow."""
        while node:
            self._growing_path.add(node)
            node = self._twigs[node].parent

    def _label(self, node: int) -> Text:
        twig = self._twigs[node]
        if node == ROOT:
            return Text(twig.text, style="bold", no_wrap=True, overflow="ellipsis")
        label = Text(no_wrap=True, overflow="ellipsis")
        if twig.reward is not None:
            label.append(f"{twig.reward:.2f} ", style=_colour(twig))
        bold = node in self._chosen_path or node in self._growing_path
        style = "bold" if bold else FADED if twig.state == "pruned" else ""
        label.append("× " if twig.state == "pruned" else "", style=FADED)
        label.append(twig.text, style=style)
        label.append(self._kv_of(twig), style="magenta" if self._just_back(twig) else FADED)
        if twig.state == "finished":
            label.append(" ●", style="bold green" if node in self._chosen_path else FADED)
        return label

    def _kv_of(self, twig: Twig) -> str:
        """A mark if an open step's KV was rehydrated or is partly evicted, else empty."""
        if twig.held_tokens is None or twig.state != "open":
            return ""
        if self._just_back(twig):
            return " ↻"
        return "" if twig.held_tokens == twig.tokens else f" {twig.held_tokens}/{twig.tokens} KV"

    def _just_back(self, twig: Twig) -> bool:
        """Whether the KV came back in the newest complete round or later."""
        return 0 < self._round - 1 <= twig.back_round

    def _line(self, event: dict[str, Any]) -> str | None:
        node: int = event.get("node") or ROOT
        match event["event"]:
            case "expanded":
                step = self._twigs[node].text
                return f"round {event['round']}: step {node} below {event['parent']}: {step}"
            case "scored":
                return f"round {event['round']}: step {node} scores {event['reward']:.4f}"
            case "finished" | "pruned" as state:
                return f"round {event['round']}: step {node} {state}"
        return None


def _colour(twig: Twig) -> str:
    """The colour of a reward, from red for 0 to green for 1; faded for a pruned step."""
    if twig.state == "pruned" or twig.reward is None:
        return FADED
    red, green = round(220 * (1 - twig.reward)), round(60 + 140 * twig.reward)
    return f"rgb({red},{green},60)"
