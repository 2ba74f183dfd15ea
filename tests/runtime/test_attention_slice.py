"""Signal a: what the end of a step attends to is read off the model, and changes nothing of it."""

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
    """The model."""
    return Forward(checkpoint, threads=1)


@pytest.fixture
def attentive(tmp_path: Path) -> Path:
    """A file with the coefficients of all signals."""
    save_theta(UNFITTED, tmp_path / "theta.json")
    return tmp_path / "theta.json"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_weights_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """The second layer of three, the query heads of the first key head, averaged; at the last of 70
    tokens."""
    folder = make_checkpoint(tmp_path / name, name, num_hidden_layers=3)
    forward, ids = Forward(folder, threads=1), np.arange(70)
    store = forward.new_store(100)
    store.watch()
    slots = np.random.default_rng(0).permutation(100)[:70]
    forward.run([Span(ids[:50], 0, slots[:50], 50)], store)
    forward.run([Span(ids[50:], 50, slots, 20)], store)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        told = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
    expected = told[1][0, :2, -1].mean(0).numpy()
    assert store.attention(slots) == pytest.approx(expected, abs=1e-5)
    assert store.attention(slots).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.promise("Nor does reading what the end of a step attends to")
def test_keeping_queries_changes_no_logits(forward: Forward) -> None:
    """The same bits with and without, and in what is computed after a reading."""
    ids, said = np.arange(40), []
    for watched in (False, True):
        store = forward.new_store(40)
        if watched:
            store.watch()
        first = forward.run([Span(ids[:30], 0, np.arange(30), 0)], store)
        if watched:
            store.attention(np.arange(30))
        then = forward.run([Span(ids[30:], 30, np.arange(40), 0)], store)
        said.append([first, then, *store.both])
    assert all(map(torch.equal, *said))


def grown(
    forward: Forward, theta: Path | None, kv_tokens: int = 2000
) -> tuple[list[Step], list[Branch], Scheduler]:
    """Three rounds of a small search, three children of the two lowest open nodes each."""
    options = EngineOptions("", kv_tokens=kv_tokens, batch_limit=8, kv_theta=theta)
    engine = Scheduler(options, forward, forward.config, Letters())
    paths, steps, asked = {ROOT: PROMPT}, [], []
    front = [ROOT]
    for call in range(3):
        engine.hint("tree", Hint(active=tuple(front)))
        branches = [
            Branch(n, i, paths[n], node_seed(1, "t", (n, i)), 9, len(paths) + 3 * at + i)
            for at, n in enumerate(front)
            for i in range(3)
        ]
        engine.expand(call, "tree", branches, STEPS)
        drawn = finish(engine)[call]
        for branch, step in zip(branches, drawn, strict=True):
            paths[branch.node] = branch.tokens + step.tokens
        going_on = zip(branches, drawn, strict=True)
        front = [b.node for b, step in going_on if step.finish is not Finish.END][:2]
        steps, asked = steps + drawn, asked + branches
    engine.check()
    return steps, asked, engine


def test_steps_are_the_same_with_and_without(
    forward: Forward, attentive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a roomy pool and in one that evicts; only what is told of attention differs."""
    monkeypatch.setattr(Letters, "pieces", (*Letters.pieces, *[b"?"] * 300))
    monkeypatch.setattr(Letters, "eos", frozenset[int]())
    plain, *_ = grown(forward, None)
    roomy, asked, _ = grown(forward, attentive)
    tight, _, engine = grown(forward, attentive, kv_tokens=90)
    told = [(s.tokens, s.text, s.finish, s.logprob, s.entropy) for s in plain]
    for steps in (roomy, tight):
        assert [(s.tokens, s.text, s.finish, s.logprob, s.entropy) for s in steps] == told
    assert engine.cache.evicted_tokens > 0
    assert not any(step.attention for step in plain)
    for branch, step in zip(asked, roomy, strict=True):
        depth = (len(branch.tokens) - len(PROMPT)) // 9
        assert len(step.attention) == 2 + depth
        assert all(0 < share < 1 for share in step.attention)


def test_every_later_step_adds_to_what_a_block_has_got(
    forward: Forward, attentive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end counts once for each block above it, the prompt's and its own included."""
    monkeypatch.setattr(Letters, "pieces", (*Letters.pieces, *[b"?"] * 300))
    monkeypatch.setattr(Letters, "eos", frozenset[int]())
    heard: dict[int, list[float]] = {}
    attend = TreeBlocks.add_attention

    def hear(blocks: TreeBlocks, node: int, mass: float, queries: int) -> None:
        assert queries == 1
        heard.setdefault(node, []).append(mass)
        attend(blocks, node, mass, queries)

    monkeypatch.setattr(TreeBlocks, "add_attention", hear)
    steps, asked, engine = grown(forward, attentive)
    assert len(heard[ROOT]) == len(steps) == 15
    parents = [branch.parent for branch in asked]
    below = {b.node: 1 for b in asked}
    for branch in reversed(asked):
        if branch.parent != ROOT:
            below[branch.parent] += below[branch.node]
    assert {node: len(masses) for node, masses in heard.items() if node != ROOT} == below
    assert math.isclose(sum(heard[ROOT]), sum(step.attention[0] for step in steps))
    assert max(parents) > ROOT
    assert engine.cache.evictor.seconds > 0
