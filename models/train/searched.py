"""Grow trees of train questions as `rebase` does, many at once and on any device.

A wide search fools a reward model that never saw what such a search selects: each tree gives the
leaves that teach most, labelled by the checker.
"""

import json
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from models.tasks import TASKS
from models.tasks.task import STEP_BREAK, Task
from models.train.batches import IGNORED, Row, micro_batches, pad_id, prompt_ids
from models.train.checkpoint import load_model
from models.train.labelled import Labelled, flat, label, label_steps
from models.train.network import logits_at
from models.train.prm_data import train_questions
from models.train.rows import sign_ids
from models.train.sampling import ROOM, Sampler
from models.train.tokenizer import TAG
from models.train.tree_data import instructive
from search.policies.rebase import allocate

WIDTH = 64
TEMPERATURES = (0.1, 0.2, 0.4, 4.0)
"""Reward temperatures, one for each tree; by the last one, a tree is of plain samples."""
STEP_TOKENS = 64
LAST_SHARE = 0.5
SCORED_TOKENS, GPU_SCORED_TOKENS = 4096, 262_144


@dataclass(frozen=True)
class Path:
    """Steps from the root, and the reward of the last."""

    steps: tuple[tuple[int, ...], ...] = ()
    reward: float = 1.0

    def ids(self) -> list[int]:
        """All steps' tokens."""
        return list(chain.from_iterable(self.steps))


@dataclass
class GrownTree:
    """One question's tree: its frontier, which may still grow, and its leaves, `ended` of them."""

    question: str
    prompt: list[int]
    temperature: float
    frontier: list[Path] = field(default_factory=lambda: [Path()])
    leaves: list[Path] = field(default_factory=list)
    ended: int = 0

    def distinct(self) -> list[Path]:
        """The leaves and the frontier, one path for equal steps."""
        paths = [*self.leaves, *self.frontier]
        return list({path.steps: path for path in paths if path.steps}.values())


class Searcher:
    """Grows trees with one policy and any reward model."""

    def __init__(self, policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.sampler = tokenizer, Sampler(policy)
        (self.step_break,) = tokenizer.encode(STEP_BREAK)
        (self.tag,) = tokenizer.encode(TAG)
        self.pad = pad_id(tokenizer)
        self.signs = torch.tensor(sign_ids(tokenizer), device=policy.device)

    def trees(
        self, prm: LlamaForCausalLM, task: Task, questions: Sequence[str], rng: random.Random
    ) -> list[GrownTree]:
        """The trees of these questions, `WIDTH` wide."""
        trees = [
            GrownTree(question, prompt_ids(self.tokenizer, question), rng.choice(TEMPERATURES))
            for question in questions
        ]
        for _ in range(task.max_depth + 2):
            children = [(tree, path) for tree in trees for path in self._shares(tree)]
            if not children:
                break
            self._grow(prm, children, rng.getrandbits(40))
        return trees

    def _shares(self, tree: GrownTree) -> Iterator[Path]:
        """Yield each frontier path once for each child that it gets; the others become leaves."""
        ranked = sorted(tree.frontier, key=lambda path: -path.reward)
        tree.frontier = []
        if not ranked:
            return
        shares = allocate([p.reward for p in ranked], WIDTH - tree.ended, tree.temperature)
        for path, share in zip(ranked, shares, strict=True):
            if share == 0:
                tree.leaves.append(path)
            yield from [path] * share

    def _grow(
        self, prm: LlamaForCausalLM, children: list[tuple[GrownTree, Path]], seed: int
    ) -> None:
        """Draw and score one step for each child."""
        prompts = [tree.prompt for tree, _ in children]
        prefixes = [p + path.ids() for p, (_, path) in zip(prompts, children, strict=True)]
        room = min(ROOM, max(map(len, prefixes)) + STEP_TOKENS)
        steps = self.sampler.sample(prefixes, seed, room, frozenset({self.step_break}))
        paths = [
            replace(path, steps=(*path.steps, tuple(step)))
            for (_, path), step in zip(children, steps, strict=True)
        ]
        rewards = self._rewards(prm, prompts, paths)
        for (tree, _), path, reward in zip(children, paths, rewards, strict=True):
            child = replace(path, reward=reward)
            if path.steps[-1][-1] == self.step_break:
                tree.frontier.append(child)
            else:
                tree.leaves.append(child)
                tree.ended += 1

    @torch.no_grad()
    def _rewards(
        self, prm: LlamaForCausalLM, prompts: list[list[int]], paths: list[Path]
    ) -> list[float]:
        """P(`+`) at the last tag of each path."""
        rows = [
            tagged_end(prompt + flat([[*step, self.tag] for step in path.steps]))
            for prompt, path in zip(prompts, paths, strict=True)
        ]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        most = GPU_SCORED_TOKENS if self.sampler.device.type == "cuda" else SCORED_TOKENS
        rewards: list[float] = []
        for batch in micro_batches([rows[i] for i in order], self.pad, most):
            ids, labels, _ = batch.to(self.sampler.device)
            logits = logits_at(prm, ids, labels != IGNORED)[:, self.signs]
            rewards += logits.softmax(-1)[:, 0].tolist()
        by_row = dict(zip(order, rewards, strict=True))
        return [by_row[i] for i in range(len(rows))]


def tagged_end(ids: list[int]) -> Row:
    """A path to be scored at its last token alone."""
    return Row("", ids, [IGNORED] * (len(ids) - 1) + [0])


def telling(
    tokenizer: PreTrainedTokenizerBase, name: str, question: str, leaves: list[Path], seed: int
) -> list[Labelled]:
    """The labelled leaves of a tree that teach most."""
    ends = [*tokenizer.encode(STEP_BREAK), tokenizer.eos_token_id]
    rows = []
    for leaf in leaves:
        steps = [list(step) for step in leaf.steps]
        row = label_steps(tokenizer, TASKS[name], question, steps)
        if steps[-1][-1] not in ends:
            row.labels[-1] = False
        rows.append((leaf.reward, row))
    return instructive(rows, random.Random(seed))


class TreeRounds:
    """Labelled leaves of trees that are grown, round after round, with the current reward model:
    `trees` of each of the `tasks`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        device: str,
        tasks: Sequence[str],
        trees: int,
        seed: int,
    ) -> None:
        self.tokenizer, self.trees, self.seed = tokenizer, trees, seed
        policy = load_model("policy")
        nn.Module.to(policy, device)
        self.searcher = Searcher(policy, tokenizer)
        self.rounds: dict[str, list[list[Labelled]]] = {name: [] for name in tasks}

    def grow(self, prm: LlamaForCausalLM, workers: int) -> float:
        """Add a round, labelled by `workers` processes; return the seconds that it took."""
        start = time.monotonic()
        for name, rounds in self.rounds.items():
            rng = random.Random(f"{self.seed} {name} {len(rounds)}")
            questions = train_questions(TASKS[name], rng, self.trees)
            trees = self.searcher.trees(prm, TASKS[name], questions, rng)
            calls = [
                (self.tokenizer, name, tree.question, tree.distinct(), rng.getrandbits(40))
                for tree in trees
            ]
            with multiprocessing.get_context("fork").Pool(max(1, workers)) as pool:
                rounds.append(list(chain.from_iterable(pool.starmap(telling, calls, chunksize=4))))
            line = {"task": name, "round": len(rounds), "rows": len(rounds[-1])}
            line |= {"best_right": self._best_right(TASKS[name], trees)}
            print(json.dumps(line | {"s": round(time.monotonic() - start)}), flush=True)
        if prm.device.type == "cuda":
            torch.cuda.empty_cache()
        return time.monotonic() - start

    def _best_right(self, task: Task, trees: list[GrownTree]) -> float:
        """The share of trees whose best-rewarded reply is right."""
        best = [max(tree.leaves, key=lambda leaf: leaf.reward) for tree in trees]
        rows = [
            label(self.tokenizer, task, tree.question, leaf.ids())
            for tree, leaf in zip(trees, best, strict=True)
        ]
        return sum(row.labels[-1] for row in rows) / len(rows)

    def draw(self, rng: random.Random, count: int) -> list[Labelled]:
        """Draw `count` rows, tasks with equal odds; half from the last round, half from any."""
        rows = []
        for _ in range(count):
            rounds = self.rounds[rng.choice(list(self.rounds))]
            rows.append(rng.choice(rounds[-1] if rng.random() < LAST_SHARE else rng.choice(rounds)))
        return rows
