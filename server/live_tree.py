"""A search as it grows, in a terminal: a live tree, or plain lines where there is none."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree as RichTree

FADED = "bright_black"
ROOT = 0
LEAST_LINES = 6
OTHER_LINES = 4
FRAMES_PER_SECOND = 8
PICTURE_COLUMNS, PICTURE_LINES = 96, 34
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@dataclass(slots=True)
class Twig:
    """What is shown of a node."""

    parent: int
    text: str
    reward: float | None = None
    state: str = "open"
    children: list[int] = field(default_factory=list)


class LiveTree:
    """Draws a search from its events (as dicts); use it as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._twigs = {ROOT: Twig(-1, title)}
        self._chosen: set[int] = set()
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

    def hear(self, event: dict[str, Any]) -> None:
        """Take in an event; without a terminal, print it as a line."""
        self._grow(event)
        if not self._console.is_terminal:
            line = self._line(event)
            if line is not None:
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def render(self) -> RenderableType:
        """The tree, the chosen path and living branches first, no higher than the terminal."""
        return self._drawing(max(LEAST_LINES, self._console.size.height - OTHER_LINES))

    def save_picture(self, path: Path, title: str) -> None:
        """Write the tree as it stands to an SVG file that needs nothing from elsewhere."""
        paper = Console(
            record=True, file=io.StringIO(), width=PICTURE_COLUMNS, color_system="truecolor"
        )
        paper.print(self._drawing(PICTURE_LINES))
        svg = paper.export_svg(title=title)
        path.write_text(WEB_FONT.sub("", svg))

    def _drawing(self, room: int) -> RichTree:
        """The tree in at most ``room`` lines."""
        shown = self._visible(room)
        trunk = RichTree(self._label(ROOT), guide_style=FADED)
        branches = {ROOT: trunk}
        for node in sorted(shown - {ROOT}):
            branches[node] = branches[self._twigs[node].parent].add(self._label(node))
        hidden = len(self._twigs) - len(shown)
        if hidden:
            trunk.add(Text(f"… {hidden} more steps", style=FADED))
        return trunk

    def _visible(self, room: int) -> set[int]:
        """The nodes to draw, ancestors included, at most ``room``."""
        shown = {ROOT}
        for node in sorted(self._twigs, key=self._rank):
            path = set()
            while node not in shown:
                path.add(node)
                node = self._twigs[node].parent
            if len(shown) + len(path) <= room:
                shown |= path
        return shown

    def _rank(self, node: int) -> tuple[bool, bool, float, int]:
        twig = self._twigs[node]
        faded = twig.state == "pruned"
        return node not in self._chosen, faded, -(twig.reward or 0.0), node

    def _grow(self, event: dict[str, Any]) -> None:
        node: int = event.get("node") or ROOT
        match event["event"]:
            case "expanded":
                text = " ".join(event["text"].split()) or "(empty)"
                self._twigs[node] = Twig(event["parent"], text)
                self._twigs[event["parent"]].children.append(node)
            case "scored":
                self._twigs[node].reward = event["reward"]
            case "finished" | "pruned":
                self._twigs[node].state = event["event"]
            case "answer" | "answered":
                while node:
                    self._chosen.add(node)
                    node = self._twigs[node].parent

    def _label(self, node: int) -> Text:
        twig = self._twigs[node]
        if node == ROOT:
            return Text(twig.text, style="bold", no_wrap=True, overflow="ellipsis")
        label = Text(no_wrap=True, overflow="ellipsis")
        if twig.reward is not None:
            label.append(f"{twig.reward:.2f} ", style=_colour(twig))
        style = "bold" if node in self._chosen else FADED if twig.state == "pruned" else ""
        label.append(twig.text, style=style)
        if twig.state == "finished":
            label.append(" ●", style="bold green" if node in self._chosen else FADED)
        return label

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
    """From red for 0 to green for 1; faded once pruned."""
    if twig.state == "pruned" or twig.reward is None:
        return FADED
    red, green = round(220 * (1 - twig.reward)), round(60 + 140 * twig.reward)
    return f"rgb({red},{green},60)"
