"""An engine whose searches are recorded for ``hedgerow calibrate``."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.fit import Rows
from kvpolicy.reentry import ReentryRecorder
from kvpolicy.value import confidence_of_entropy
from runtime.passed_on import PassedOn
from search.engine import Branch, Engine, Hint, Sampling, Step, TreeCost
from search.tree import ROOT, Finish


class Recorder(PassedOn):
    """Follows every search by what passes between it and the engine, and changes nothing of it."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        """``vocab``: the policy model's tokens, for u."""
        super().__init__(engine)
        self._vocab = vocab
        self._searches: dict[str, ReentryRecorder] = {}
        self._recorded: dict[str, Rows] = {}

    def take(self) -> list[Rows]:
        """The rows of each search that has ended since the last call, by their trees' names."""
        recorded, self._recorded = self._recorded, {}
        return [recorded[name] for name in sorted(recorded, key=lambda name: (len(name), name))]

    def hint(self, tree: str, hint: Hint) -> None:
        """The search moves on."""
        if tree in self._searches:
            search = self._searches[tree]
            search.transition(hint.values, hint.active, hint.dead, hint.outlook)
        super().hint(tree, hint)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Blocks close, but for those that ended their reply: nothing can follow them."""
        if tree not in self._searches:
            search = self._searches[tree] = ReentryRecorder(len(branches[0].tokens))
            search.transition({}, [ROOT], ())
        steps = await super().expand(tree, branches, sampling)
        search = self._searches[tree]
        for branch, step in zip(branches, steps, strict=True):
            if step.finish is not Finish.END:
                confidence = confidence_of_entropy(step.entropy, self._vocab)
                known = branch.node, branch.parent, len(step.tokens), confidence, step.attention
                search.boundary(*known)
        return steps

    async def release(self, tree: str) -> TreeCost:
        """The search is over: its rows can be told."""
        search = self._searches.pop(tree, None)
        if search is not None:
            self._recorded[tree] = search.rows()
        return await super().release(tree)

    async def abort(self, tree: str) -> None:
        """What was cut short says nothing of what would have come back."""
        self._searches.pop(tree, None)
        await super().abort(tree)
