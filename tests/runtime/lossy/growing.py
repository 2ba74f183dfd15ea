"""Searches on tiny random models that go back, for tests of paper mode."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.extractive import Floors
from runtime.lossy.engine import LossyEngine, LossyModel
from runtime.lossy.options import LossyOptions
from runtime.twin import Twin, TwinOptions
from search.controller import Problem, search
from search.engine import Engine
from search.outcome import Outcome
from search.spec import SearchSpec
from tests.runtime.tiny_models import make_tokenizer

PROMPT = tuple(make_tokenizer().encode("Use 4 9 10 13 to make 24.\n"))
ROOMY = 4_000
SPECS = {
    name: SearchSpec(
        policy=name,  # type: ignore[arg-type]
        width=60,
        seed=6,
        expansions=14,
        parallel=2,
        enough_answers=60,
        max_step_tokens=10,
        max_depth=6,
        temperature=0.6,
    )
    for name in ("best_first", "mcts")
}
"""Steps of up to ten tokens; some are said twice."""


def twin(checkpoint: Path) -> Twin:
    """The naive engine, which also scores for paper mode."""
    return Twin(TwinOptions(policy=checkpoint, prm=checkpoint, reward_format="math-shepherd"))


def lossy(
    checkpoint: Path,
    kv_policy: str,
    kv_tokens: int = ROOMY,
    share: float = 1.0,
    floors: Floors | None = None,
) -> LossyEngine:
    """Paper mode in a budget."""
    options = LossyOptions(kv_policy, kv_tokens, share, floors or Floors(tokens=2, tail=2))
    return LossyEngine(LossyModel(checkpoint), twin(checkpoint), options)


async def grow(engine: Engine, spec: SearchSpec, name: str = "tree") -> Outcome:
    """One search; a reply's answer is its last letter."""
    return await search(
        Problem(PROMPT, ""),
        spec,
        engine,
        tree_id=name,
        answer_of=lambda text: text[-1:] or None,
        clock=lambda: 0.0,
    )
