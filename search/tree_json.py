"""A tree as JSON and back, for files, responses and replays."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from search.tree import ROOT, Finish, Node, NodeState, Tree

VERSION = 1
"""The version of the layout, increased with every change; other versions are refused."""


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: int = Field(ge=1)
    parent: int = Field(ge=0)
    tokens: tuple[int, ...]
    text: str
    finish: Finish
    state: NodeState
    reward: float | None = Field(ge=0.0, le=1.0)
    logprob: float | None
    entropy: float | None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    prompt: tuple[int, ...] = Field(min_length=1)
    nodes: tuple[_Step, ...]


def to_json(tree: Tree) -> dict[str, object]:
    """The tree as a JSON-able dict: version, prompt ids and every step in id order.

    Child indices, depths and paths follow from the parents; embeddings are left out.
    """
    return {
        "version": VERSION,
        "prompt": list(tree.prompt),
        "nodes": [_step(node) for node in tree.nodes if node.id != ROOT],
    }


def from_json(document: Mapping[str, object]) -> Tree:
    """The tree that ``to_json`` wrote.

    Raises ValueError naming the field, its value and what is allowed.
    """
    if document.get("version") != VERSION:
        version = document.get("version")
        raise ValueError(f"tree.version: {version!r}; only version {VERSION} can be read")
    try:
        stored_tree = _Document.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"tree.{field}: {first['input']!r}; {first['msg']}") from error
    tree = Tree(stored_tree.prompt)
    for step in stored_tree.nodes:
        _grow(tree, step)
    for step in stored_tree.nodes:
        if step.state is NodeState.PRUNED:
            tree.prune(step.id)
        if tree[step.id].state is not step.state:
            allowed = f"{tree[step.id].state} after finish {step.finish}"
            raise ValueError(f"tree.nodes.state: {step.state} of node {step.id}; {allowed}")
    return tree


def _step(node: Node) -> dict[str, object]:
    return {
        "id": node.id,
        "parent": node.parent,
        "tokens": list(node.tokens),
        "text": node.text,
        "finish": node.finish.value,
        "state": node.state.value,
        "reward": node.reward,
        "logprob": node.logprob,
        "entropy": node.entropy,
    }


def _grow(tree: Tree, step: _Step) -> None:
    if step.id != len(tree):
        raise ValueError(f"tree.nodes.id: {step.id}; expected {len(tree)}: ids count from 1")
    if step.parent >= step.id:
        raise ValueError(f"tree.nodes.parent: {step.parent} of node {step.id}; must be lower")
    node = tree.add(
        step.parent,
        step.tokens,
        step.text,
        step.finish,
        logprob=step.logprob,
        entropy=step.entropy,
    )
    node.reward = step.reward
