"""The engine around a drawing: costs, usage, stopping, and what is another engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.token_eviction.token_eviction_options import TokenEvictionOptions
from search.engine import Branch, EngineError, PrefixTooLong, Sampling, Trajectory, TreeCost
from search.tree import ROOT
from tests.loadtest.token_eviction.support import PROMPT, reference, token_eviction
from tests.runtime.tiny_models import make_checkpoint

ENDLESS = Sampling(stop=(), max_step_tokens=400)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", initializer_range=0.05)


def branches(count: int, limit: int) -> list[Branch]:
    """The first children of the root."""
    return [Branch(ROOT, i, PROMPT, 7 + i, limit, i + 1) for i in range(count)]


async def test_what_it_can_do_is_said(llama: Path) -> None:
    """Not exact; named with its policy, budget and share; draws follow seeds all the same."""
    able = token_eviction(llama, "h2o", 200, share=0.25).capabilities
    assert (able.engine, able.exact, able.reproducible) == ("token_eviction", False, "seeded")
    assert able.fingerprint.endswith("-h2o-200-0.25")
    assert able.scores


async def test_costs_of_both_engines_come_together(llama: Path) -> None:
    """Tokens drawn here, tokens scored there; afterwards nothing is held."""
    engine = token_eviction(llama, "extractive", 200)
    steps = await engine.expand("tree", branches(2, 10), Sampling(stop=()))
    paths = [Trajectory(1, (steps[0].tokens,), (steps[0].text,))]
    assert await engine.score("tree", PROMPT, "", paths) == await reference(llama).score(
        "tree", PROMPT, "", paths
    )
    assert (await engine.usage()).kv_tokens_active == engine.decoders["tree"].held.count
    cost = await engine.release("tree")
    lengths = [len(step.tokens) for step in steps]
    assert cost.decoded_tokens == sum(lengths)
    assert cost.prefilled_tokens == len(PROMPT) + 1
    assert cost.prm_tokens == len(PROMPT) + lengths[0] + 1
    assert len(PROMPT) + max(lengths) <= cost.kv_tokens_peak <= len(PROMPT) + sum(lengths)
    assert (await engine.usage()).kv_tokens_active == 0
    assert await engine.release("tree") == TreeCost()


async def test_trees_do_not_share(llama: Path) -> None:
    """The same prompt twice is held twice, each in its own budget, and says the same."""
    engine = token_eviction(llama, "extractive", 100)
    one = await engine.expand("one", branches(2, 10), Sampling(stop=()))
    two = await engine.expand("two", branches(2, 10), Sampling(stop=()))
    assert one == two
    held = [drawing.held.count for drawing in engine.decoders.values()]
    assert (await engine.usage()).kv_tokens_active == sum(held) == 2 * held[0]


async def test_an_abort_stops_what_is_under_way(llama: Path) -> None:
    """The call raises, nothing is held, and the engine goes on with the next tree."""
    engine = token_eviction(llama, "extractive", 500)
    call = asyncio.ensure_future(engine.expand("tree", branches(1, 400), ENDLESS))
    while "tree" not in engine.decoders:
        await asyncio.sleep(0.001)
    await engine.abort("tree")
    with pytest.raises(EngineError, match="'tree' was aborted"):
        await call
    assert engine.decoders == {}
    assert await engine.expand("tree", branches(1, 3), Sampling(stop=()))


async def test_a_cancelled_round_ends_before_the_next_one_begins(llama: Path) -> None:
    """Its slots are free again, and the tree may go on."""
    engine = token_eviction(llama, "extractive", 500)
    call = asyncio.ensure_future(engine.expand("tree", branches(1, 400), ENDLESS))
    while "tree" not in engine.decoders:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    drawing = engine.decoders["tree"]
    drawing.check()
    assert drawing.held.count == len(PROMPT)
    assert await engine.expand("tree", branches(1, 3), Sampling(stop=()))


async def test_what_cannot_be_drawn_is_refused(llama: Path) -> None:
    """A path over the context, one over the budget, a tree that begins in its middle."""
    engine = token_eviction(llama, "extractive", 60)
    with pytest.raises(PrefixTooLong, match="the context of 512"):
        await engine.expand("tree", branches(1, 500), ENDLESS)
    with pytest.raises(PrefixTooLong, match="do not fit kv_tokens 60"):
        await engine.expand("tree", branches(1, 60), ENDLESS)
    with pytest.raises(EngineError, match="parent: node 3 of tree 'other' has no KV"):
        await engine.expand("other", [Branch(3, 0, PROMPT, 1, 5, 4)], ENDLESS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("mru", 10), "kv_policy: 'mru'; one of extractive, "),
        (("extractive", 0), "kv_tokens: 0; at least 1"),
        (("h2o", 10, 0.0), r"share: 0\.0; more than 0"),
    ],
)
def test_wrong_options_are_refused_by_name(options: tuple, said: str) -> None:
    """The field, its value and what is allowed."""
    with pytest.raises(ValueError, match=said):
        TokenEvictionOptions(*options)
