"""A scheduler over the hash model and searches to run in it, for the engine's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from runtime.embedded.branch_sampling import SampleFunction, sample_requests
from runtime.embedded.options import EngineOptions
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from search.engine import Branch, Sampling, Step
from search.tree import ROOT, Finish, node_seed
from tests.runtime.hash_model import CONFIG, HashModel, Letters

SAMPLING = Sampling(temperature=0.9, top_p=0.95, max_step_tokens=12)


OPTIONS = EngineOptions("hash", kv_tokens=4000, draft_kv_tokens=4000, batch_limit=64)


def scheduler(
    *,
    model: HashModel | None = None,
    speculation: SpeculativeDecoder | None = None,
    sample: SampleFunction = sample_requests,
    **changes: Any,
) -> tuple[Scheduler, HashModel]:
    """A scheduler over a hash model (a fresh one by default); ``changes``: fields of OPTIONS."""
    model, options = model or HashModel(), replace(OPTIONS, **changes)
    engine = Scheduler(options, model, CONFIG, Letters(), speculation=speculation, sample=sample)
    return engine, model


def finish(engine: Scheduler) -> dict[int, list[Step]]:
    """Step until nothing is left to draw; returns the steps by call."""
    answers: dict[int, list[Step]] = {}
    while engine.busy:
        answers |= {answer.call: answer.steps for answer in engine.step()}
    return answers


def children(
    tokens: tuple[int, ...], count: int, *, parent: int = ROOT, seed: int = 0
) -> list[Branch]:
    """``count`` branches from one prefix."""
    return [
        Branch(
            parent,
            i,
            tokens,
            node_seed(seed, str(tokens), (i,)),
            SAMPLING.max_step_tokens,
            1000 * parent + i + 1,
        )
        for i in range(count)
    ]


@dataclass
class Grower:
    """Grows random trees level by level, as a search would, several at once."""

    engine: Scheduler
    calls: int = 0
    sampling: Sampling = SAMPLING

    def round(self, rounds: dict[str, list[Branch]]) -> dict[str, list[Step]]:
        """Draw one round of every tree at once; the steps by tree."""
        tree_of = {}
        for tree, branches in rounds.items():
            self.calls += 1
            tree_of[self.calls] = tree
            self.engine.expand(self.calls, tree, branches, self.sampling)
        return {tree_of[call]: steps for call, steps in finish(self.engine).items()}

    def grow(self, trees: dict[str, tuple[int, ...]], depth: int, width: int) -> dict[str, list]:
        """Every tree's (branch, step) pairs after ``depth`` rounds."""
        tree_steps: dict[str, list] = {tree: [] for tree in trees}
        rounds = {tree: children(prompt, width) for tree, prompt in trees.items()}
        for level in range(depth):
            for tree, steps in self.round(rounds).items():
                tree_steps[tree] += zip(rounds[tree], steps, strict=True)
                leaves = [
                    (*b.tokens, *s.tokens)
                    for b, s in zip(rounds[tree], steps, strict=True)
                    if s.finish is not Finish.END
                ][: max(1, width // 2)]
                rounds[tree] = [
                    b
                    for i, leaf in enumerate(leaves)
                    for b in children(leaf, 2, parent=100 * level + i + 1)
                ]
            rounds = {tree: branches for tree, branches in rounds.items() if branches}
        return tree_steps


PROMPTS = {f"tree{i}": tuple(random.Random(i).choices(range(26), k=20 + i)) for i in range(8)}


def unique_tokens(paths: list[tuple[int, ...]]) -> int:
    """The number of distinct token prefixes of the paths."""
    return len({path[:n] for path in paths for n in range(1, len(path) + 1)})
