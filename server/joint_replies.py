"""Several replies to one request, drawn together: a piece of each is one call of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from runtime.engine_wrapper import EngineWrapper
from search.counters import Counters
from search.engine import Branch, Engine, Sampling, Step
from search.tree import ROOT

Asked = tuple[Branch, "asyncio.Future[Step]"]


class JointReplies(EngineWrapper):
    """An engine for replies that are drawn side by side, each as a tree of ``trees``.

    They are branches of the one ``tree``: when every reply that is not over has asked for its next
    piece, all are drawn in one call. Their seeds are their own, so they say what they say alone.
    """

    def __init__(self, engine: Engine, tree: str, trees: Sequence[str]) -> None:
        super().__init__(engine)
        self._tree = tree
        self._places = {name: place for place, name in enumerate(trees)}
        self._going = set(trees)
        self._asked: dict[str, Asked] = {}
        self._sampling = Sampling()
        self._drawing: asyncio.Task[list[Step]] | None = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """The next piece of one reply, when the others have asked for theirs."""
        (branch,) = branches
        step: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._asked[tree] = self._apart(branch, self._places[tree]), step
        self._sampling = sampling
        self._draw_when_all_ask()
        return [await step]

    async def release(self, tree: str) -> Counters:
        """One reply is over; what all have cost with the last one."""
        return await super().release(self._tree) if self._leave(tree) else Counters()

    async def abort(self, tree: str) -> None:
        """One reply is given up; with the last one goes what is under way."""
        if self._leave(tree):
            await super().abort(self._tree)

    def _leave(self, tree: str) -> bool:
        """Whether no reply is left."""
        self._going.discard(tree)
        self._asked.pop(tree, None)
        self._draw_when_all_ask()
        if not self._going and self._drawing is not None:
            self._drawing.cancel()
        return not self._going

    def _apart(self, branch: Branch, place: int) -> Branch:
        """With ids that no other reply has."""

        def own(node: int) -> int:
            return node if node == ROOT else (node - 1) * len(self._places) + place + 1

        child = place if branch.parent == ROOT else branch.child
        return replace(branch, parent=own(branch.parent), child=child, node=own(branch.node))

    def _draw_when_all_ask(self) -> None:
        if not self._asked or len(self._asked) < len(self._going):
            return
        asked, self._asked = list(self._asked.values()), {}
        branches = [branch for branch, _ in asked]
        drawing = super().expand(self._tree, branches, self._sampling)
        self._drawing = asyncio.ensure_future(drawing)
        self._drawing.add_done_callback(partial(_tell, asked))


def _tell(asked: Sequence[Asked], drawing: asyncio.Task[list[Step]]) -> None:
    """Everyone who still waits gets a step, or the error."""
    for place, (_, step) in enumerate(asked):
        if step.done():
            continue
        if drawing.cancelled():
            step.cancel()
        elif (error := drawing.exception()) is not None:
            step.set_exception(error)
        else:
            step.set_result(drawing.result()[place])
