"""Signal a: reading what the end of a step attends to does not change the model's outputs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, save_theta
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.scheduler import Scheduler
from search.engine import Branch, Hint, Sampling, Step
from search.tree import ROOT, Finish, node_seed
from tests.runtime.hash_model import Letters
from tests.runtime.scheduler_support import finish
from tests.runtime.tiny_models import make_checkpoint

STEPS = Sampling(temperature=1.0, max_step_tokens=9, stop=())
PROMPT = tuple(range(30, 70))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of two layers, two key heads with two query heads each."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def forward(checkpoint: Path) -> Forward:
    """The checkpoint's forward pass on one thread."""
    return Forward(checkpoint, threads=1)


@pytest.fixture
def attentive(tmp_path: Path) -> Path:
    """A θ file with coefficients for all signals."""
    save_theta(UNFITTED, tmp_path / "theta.json")
    return tmp_path / "theta.json"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_weights_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Weights are those of the middle layer, averaged over the first key head's query heads, at the
    last of 70 tokens."""
    folder = make_checkpoint(tmp_path / name, name, num_hidden_layers=3)
    forward, ids = Forward(folder, threads=1), np.arange(70)
    store = forward.new_store(100)
    store.watch()
    slots = np.random.default_rng(0).permutation(100)[:70]
    forward.run([Span(ids[:50], 0, slots[:50], 50)], store)
    forward.run([Span(ids[50:], 50, slots, 20)], store)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        attentions = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
    expected = attentions[1][0, :2, -1].mean(0).numpy()
    assert store.attention(slots) == pytest.approx(expected, abs=1e-5)
    assert store.attention(slots).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.promise(
    "Reading what the end of a step attends to changes no bit of the logits or of the KV cache."
)
def test_keeping_queries_changes_no_logits(forward: Forward) -> None:
    """Logits and KV have the same bits with and without kept queries, also after a reading."""
    ids, outputs = np.arange(40), []
    for watched in (False, True):
        store = forward.new_store(40)
        if watched:
            store.watch()
        first = forward.run([Span(ids[:30], 0, np.arange(30), 0)], store)
        if watched:
            store.attention(np.arange(30))
        then = forward.run([Span(ids[30:], 30, np.arange(40), 0)], store)
        outputs.append([first, then, *store.both])
    assert all(map(torch.equal, *outputs))


def grow_small_tree(
    forward: Forward, theta: Path | None, kv_tokens: int = 2000
) -> tuple[list[Step], list[Branch], Scheduler]:
    """Run three rounds with three children of each of two open nodes; steps, branches, engine."""
    options = EngineOptions("", kv_tokens=kv_tokens, batch_limit=8, kv_theta=theta)
    engine = Scheduler(options, forward, forward.config, Letters())
    paths, steps, all_branches = {ROOT: PROMPT}, [], []
    front = [ROOT]
    for call in range(3):
        engine.hint("tree", Hint(active=tuple(front)))
        branches = [
            Branch(n, i, paths[n], node_seed(1, "t", (n, i)), 9, len(paths) + 3 * at + i)
            for at, n in enumerate(front)
            for i in range(3)
        ]
        engine.expand(call, "tree", branches, STEPS)
        new_steps = finish(engine)[call]
        for branch, step in zip(branches, new_steps, strict=True):
            paths[branch.node] = branch.tokens + step.tokens
        going_on = zip(branches, new_steps, strict=True)
        front = [b.node for b, step in going_on if step.finish is not Finish.END][:2]
        steps, all_branches = steps + new_steps, all_branches + branches
    engine.check()
    return steps, all_branches, engine


def test_steps_are_the_same_with_and_without(
    forward: Forward, attentive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps differ only in their attention shares, in a roomy pool and in one that evicts."""
    monkeypatch.setattr(Letters, "pieces", (*Letters.pieces, *[b"?"] * 300))
    monkeypatch.setattr(Letters, "eos", frozenset[int]())
    plain, *_ = grow_small_tree(forward, None)
    roomy, branches, _ = grow_small_tree(forward, attentive)
    tight, _, engine = grow_small_tree(forward, attentive, kv_tokens=90)
    expected = [(s.tokens, s.text, s.finish, s.logprob, s.entropy) for s in plain]
    for steps in (roomy, tight):
        assert [(s.tokens, s.text, s.finish, s.logprob, s.entropy) for s in steps] == expected
    assert engine.cache.evicted_tokens > 0
    assert not any(step.attention for step in plain)
    for branch, step in zip(branches, roomy, strict=True):
        depth = (len(branch.tokens) - len(PROMPT)) // 9
        assert len(step.attention) == 2 + depth
        assert all(0 < share < 1 for share in step.attention)


def test_every_later_step_adds_to_what_a_block_has_got(
    forward: Forward, attentive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's end adds once to each block on its path, from the prompt to its own."""
    monkeypatch.setattr(Letters, "pieces", (*Letters.pieces, *[b"?"] * 300))
    monkeypatch.setattr(Letters, "eos", frozenset[int]())
    masses_of: dict[int, list[float]] = {}
    attend = TreeBlocks.add_attention

    def record_attention(blocks: TreeBlocks, node: int, mass: float, queries: int) -> None:
        assert queries == 1
        masses_of.setdefault(node, []).append(mass)
        attend(blocks, node, mass, queries)

    monkeypatch.setattr(TreeBlocks, "add_attention", record_attention)
    steps, branches, engine = grow_small_tree(forward, attentive)
    assert len(masses_of[ROOT]) == len(steps) == 15
    parents = [branch.parent for branch in branches]
    below = {b.node: 1 for b in branches}
    for branch in reversed(branches):
        if branch.parent != ROOT:
            below[branch.parent] += below[branch.node]
    assert {node: len(masses) for node, masses in masses_of.items() if node != ROOT} == below
    assert math.isclose(sum(masses_of[ROOT]), sum(step.attention[0] for step in steps))
    assert max(parents) > ROOT
    assert engine.cache.evictor.seconds > 0
