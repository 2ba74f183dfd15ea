"""The policy that CONTRIBUTING.md shows works as described there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from search.controller import search
from search.engine import Branch
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import NodeState
from tests.search.scripted_engine import ScriptedEngine, answer_of, encode

IMPORTS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from search.policies.policy import LevelPolicy, Round, Scores, by_reward
from search.spec import SearchSpec
from search.tree import Node, Tree
"""


def say(branch: Branch) -> str:
    """A few steps that never repeat, then an answer."""
    return "The answer is 1." if len(branch.tokens) > 40 else f"step {branch.seed % 997}\n\n"


async def test_the_policy_of_the_guide_keeps_one_leaf_and_its_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    greedy: Any = ModuleType("greedy")
    monkeypatch.setitem(sys.modules, "greedy", greedy)
    exec(IMPORTS + code, vars(greedy))
    outcome = await search(
        Problem(encode("Q: "), "Q"),
        SearchSpec(width=6, seed=1),
        ScriptedEngine(say),
        tree_id="guide",
        answer_of=answer_of,
        clock=lambda: 0.0,
        policy_of=greedy.Greedy.from_spec,
    )
    tree = outcome.tree
    assert len(tree.finished()) == 6
    for depth in range(1, max(node.depth for node in tree.nodes)):
        parents = [node for node in tree.nodes if node.depth == depth and node.children]
        assert len(parents) == 1
        best = (-(parents[0].reward or 0.0), parents[0].id)
        rivals = [n for n in tree.nodes if n.depth == depth and n.state is NodeState.PRUNED]
        assert all(best < (-(n.reward or 0.0), n.id) for n in rivals)
