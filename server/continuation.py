"""Searches that continue from a node of an earlier search."""

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
    """The earlier search's id, the node, and the prompt and the steps that lead to the node."""

    search: str
    node: int
    prompt: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the steps: the new tree's prompt."""
        return self.prompt + tuple(token for step in self.steps for token in step)

    @property
    def text(self) -> str:
        """The steps' text, which every reply begins with."""
        return "".join(self.texts)

    def document(self) -> dict[str, Any]:
        """The JSON for the response; ``path`` is what a further continuation needs."""
        path = {"steps": [list(step) for step in self.steps], "texts": list(self.texts)}
        return {"search": self.search, "node": self.node, "text": self.text, "path": path}


def read_continuation(document: bytes, node: int) -> tuple[dict[str, Any], Continuation]:
    """Parse a kept search's document; return it and the continuation from ``node``. Raises what
    ``continuation_at`` raises."""
    search = json.loads(document)
    return search, continuation_at(search, node)


def continuation_at(search: Mapping[str, Any], node: int) -> Continuation:
    """The continuation from a kept search's node. Raises ApiError for a missing or ended node.

    If the search was itself a continuation, the steps before it are included.
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
    """An engine that treats the continued steps as steps and output, not as prompt."""

    def __init__(self, engine: Engine, continuation: Continuation) -> None:
        super().__init__(engine)
        self._continuation = continuation

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw steps; penalties count the tokens of the whole trajectory."""
        sampling = replace(sampling, prompt_tokens=len(self._continuation.prompt))
        return await self._engine.expand(tree, branches, sampling)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score whole trajectories, from the first step of the earlier search on."""
        del prompt  # it includes the continued steps
        return await self._engine.score(
            tree, self._continuation.prompt, question, self._with_earlier_steps(trajectories)
        )

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Embed whole trajectories, from the first step of the earlier search on."""
        del prompt
        return await self._engine.embed(
            tree, self._continuation.prompt, self._with_earlier_steps(trajectories)
        )

    def _with_earlier_steps(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        steps, texts = self._continuation.steps, self._continuation.texts
        return [replace(t, steps=steps + t.steps, texts=texts + t.texts) for t in trajectories]
