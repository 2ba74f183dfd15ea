"""A search that goes on from a node of an earlier one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.engine_wrapper import EngineWrapper
from search.engine import Branch, Engine, Sampling, Step, Trajectory
from search.tree import ROOT, Finish
from search.tree_json import from_json
from server.api_errors import bad_value


@dataclass(frozen=True, slots=True)
class Continuation:
    """What stands already: the earlier search's id, the node, the prompt and the steps to it."""

    search: str
    node: int
    prompt: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and steps: what the new tree starts from."""
        return self.prompt + tuple(token for step in self.steps for token in step)

    @property
    def text(self) -> str:
        """The steps' text, with which every reply begins."""
        return "".join(self.texts)

    def document(self) -> dict[str, Any]:
        """For the response; ``path`` is enough to go on from its own nodes."""
        path = {"steps": [list(step) for step in self.steps], "texts": list(self.texts)}
        return {"search": self.search, "node": self.node, "text": self.text, "path": path}


def read_continuation(document: bytes, node: int) -> tuple[dict[str, Any], Continuation]:
    """A kept search's document, parsed, and its node to go on from. Raises as
    ``continuation_at``."""
    search = json.loads(document)
    return search, continuation_at(search, node)


def continuation_at(search: Mapping[str, Any], node: int) -> Continuation:
    """A kept search's node to go on from. Raises ApiError for one that is not there or has ended.

    A search that was itself a branch is gone on with from its own beginning.
    """
    if "tree" not in search:
        raise bad_value("id", "the search failed; there is no tree to go on from")
    tree = from_json(search["tree"])
    if not ROOT <= node < len(tree):
        raise bad_value("node", f"from 0 to {len(tree) - 1} in this tree, got {node}")
    if node != ROOT and tree[node].finish in (Finish.END, Finish.EMPTY, Finish.LOOP):
        raise bad_value("node", f"{node} has ended ({tree[node].finish.value}); nothing follows it")
    chain = tree.chain(node)
    path = search.get("branched_from", {}).get("path", {"steps": [], "texts": []})
    steps_tokens = sum(map(len, path["steps"]))
    return Continuation(
        search=search["id"],
        node=node,
        prompt=tree.prompt[: len(tree.prompt) - steps_tokens],
        steps=(*map(tuple, path["steps"]), *(step.tokens for step in chain)),
        texts=(*path["texts"], *(step.text for step in chain)),
    )


class ContinuedEngine(EngineWrapper):
    """An engine to which the steps that stand already are steps and output, not prompt."""

    def __init__(self, engine: Engine, continuation: Continuation) -> None:
        super().__init__(engine)
        self._continuation = continuation

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Penalties count the whole trajectory."""
        sampling = replace(sampling, prompt_tokens=len(self._continuation.prompt))
        return await self._engine.expand(tree, branches, sampling)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Whole trajectories, from the first step of the earlier search on."""
        del prompt  # it holds the steps that stand already
        return await self._engine.score(
            tree, self._continuation.prompt, question, self._with_earlier_steps(trajectories)
        )

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Whole trajectories, too."""
        del prompt
        return await self._engine.embed(
            tree, self._continuation.prompt, self._with_earlier_steps(trajectories)
        )

    def _with_earlier_steps(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        steps, texts = self._continuation.steps, self._continuation.texts
        return [replace(t, steps=steps + t.steps, texts=texts + t.texts) for t in trajectories]
