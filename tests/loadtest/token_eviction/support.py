"""Backtracking searches on tiny random models, for tests of token eviction."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.token_allocation import Floors
from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from loadtest.token_eviction.path_cache import PathReader
from loadtest.token_eviction.token_eviction_engine import TokenEvictionEngine
from search.controller import search
from search.engine import Engine
from search.outcome import Outcome
from search.problem import Problem
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
"""Steps of up to ten tokens; some steps come up twice."""


def reference(checkpoint: Path) -> ReferenceEngine:
    """The naive engine, which also scores for token eviction."""
    return ReferenceEngine(
        ReferenceOptions(policy=checkpoint, prm=checkpoint, reward_format="math-shepherd")
    )


def token_eviction(
    checkpoint: Path, kv_policy: str, kv_tokens: int = ROOMY, share: float = 1.0
) -> TokenEvictionEngine:
    """A token eviction engine with a budget of ``kv_tokens``."""
    reader, others, floors = PathReader(checkpoint), reference(checkpoint), Floors(tokens=2, tail=2)
    return TokenEvictionEngine(
        reader, others, PROMPT, kv_policy, kv_tokens, share=share, floors=floors
    )


async def grow(engine: Engine, spec: SearchSpec, name: str = "tree") -> Outcome:
    """Run a search; a reply's answer is its last character."""
    return await search(
        Problem(PROMPT, ""),
        spec,
        engine,
        tree_id=name,
        answer_of=lambda text: text[-1:] or None,
        clock=lambda: 0.0,
    )
