"""The numbers of a search, worked by hand."""

from __future__ import annotations

from search.controller import search
from search.counters import Counters
from search.engine import Branch
from search.problem import Problem
from search.spec import SearchSpec
from search.stats import SearchStats
from tests.search.scripted_engine import ScriptedEngine, encode, grow
from tests.search.test_faults import Clock


async def test_all_of_them() -> None:
    """Beam search with 2 beams at width 3; a round takes a second; the prompt has 2 tokens.

    Round 1: ``aa..`` ``ab..`` ``c...`` (4 each, aa and ab share one) = 2 + 4 + 3 + 4 = 13.
    Beam prunes aa. Round 2 below ab: two ends of 2 tokens (equal); below c: one step of 3.
    Candidates: 2 + 4 + 2 (equal ends once) + 4 + 3 = 15. Round 3: that step ends with 2 more:
    only its path is a candidate: 2 + 4 + 3 + 2 = 11.
    """
    replies = {
        "Q?": ["aa\n\n", "ab\n\n", "cc\n\n"],
        "Q?ab\n\n": ["1", "1"],
        "Q?cc\n\n": ["d\n\n"],
        "Q?cc\n\nd\n\n": ["2"],
    }

    def say(branch: Branch) -> str:
        return replies["".join(map(chr, branch.tokens))][branch.child]

    clock = Clock(10.0)
    engine = ScriptedEngine(
        say, lambda texts: 0.1 if texts[0] == "aa\n\n" else 0.5, on_expand=clock.tick
    )
    outcome = await search(
        Problem(encode("Q?"), "Q?"),
        SearchSpec(policy="beam", width=3, seed=0),
        engine,
        tree_id="t",
        answer_of=lambda text: text[-1],
        clock=clock,
    )
    assert outcome.stats == SearchStats(
        rounds=3,
        nodes=7,
        expanded=4,
        pruned=1,
        finished=3,
        depth=3,
        generated_tokens=12 + 2 + 2 + 3 + 2,
        reply_tokens=6,
        prompt_tokens=2,
        kv_tokens_total=13 + 15 + 11,
        kv_tokens_peak=15,
        policy_seconds=0.0,
        solver_fallbacks=0,
        embedder_fallbacks=0,
        embedder_fault=None,
        seconds=3.0,
        # mean length (6 + 6 + 9) / 3 over mean time (2 + 2 + 3) / 3
        precise_goodput=21 / 7,
        engine=Counters(decoded_tokens=7, prm_tokens=6, model_calls=6),
    )


async def test_policy_seconds_are_those_of_planning() -> None:
    """A clock that ticks whenever it is read: each of the plans takes one tick."""
    clock = Clock()

    def ticking() -> float:
        clock.tick()
        return clock.now

    outcome = await grow(
        ScriptedEngine(lambda b: "end" if len(b.tokens) > 1 else "s\n\n"),
        SearchSpec(width=1, seed=0),
        clock=ticking,
    )
    assert (outcome.stats.rounds, outcome.stats.policy_seconds) == (2, 3.0)


async def test_nothing_finished_has_no_goodput() -> None:
    """Without a completed trajectory goodput is 0 tokens a second."""
    outcome = await grow(
        ScriptedEngine(lambda _: "\n\n"), SearchSpec(width=2, seed=0), clock=Clock()
    )
    assert (outcome.stats.precise_goodput, outcome.stats.reply_tokens) == (0.0, 0)
    assert outcome.stats.kv_tokens_total == 1
