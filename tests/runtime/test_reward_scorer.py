"""The scorer on a model that exposes any wrong slot: rewards do not depend on the cache."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.embedded.options import EngineOptions
from runtime.embedded.reward_scorer import RewardScorer
from runtime.reward_reader import PolicyIds, Reader, Softmax
from search.engine import EngineError, Hint, PrefixTooLong, Trajectory
from tests.runtime.hash_model import CONFIG, VOCAB, HashModel, logits_after

READER = Reader(PolicyIds(tag=27), Softmax(good=0, bad=1))
PROMPT = tuple(random.Random(0).choices(range(26), k=24))


def scorer(*, kv_tokens: int = 4000, batch_limit: int = 64) -> tuple[RewardScorer, HashModel]:
    """A scorer over a fresh hash model."""
    model = HashModel()
    options = EngineOptions("hash", "hash", prm_kv_tokens=kv_tokens, batch_limit=batch_limit)
    return RewardScorer(options, model, CONFIG, READER), model


def finish(engine: RewardScorer) -> dict[int, list[float]]:
    """Step until nothing is left to read; returns the rewards by call."""
    answers: dict[int, list[float]] = {}
    while engine.busy:
        answers |= dict(engine.step())
    return answers


def random_trajectories(seed: int, rounds: int = 4, width: int = 6) -> list[list[Trajectory]]:
    """A random tree's trajectories by round; each extends one of the round before."""
    draw = random.Random(seed)
    by_round: list[list[Trajectory]] = []
    above: list[tuple[tuple[int, ...], ...]] = [()]
    node = 0
    for _ in range(rounds):
        trajectories = []
        for _ in range(width):
            node += 1
            step = tuple(draw.choices(range(26), k=draw.randrange(1, 9)))
            steps = (*draw.choice(above), step)
            trajectories.append(Trajectory(node, steps, ("",) * len(steps)))
        by_round.append(trajectories)
        above = [t.steps for t in trajectories]
    return by_round


def from_scratch(trajectory: Trajectory) -> float:
    """The reward computed without a cache."""
    logits = logits_after(READER.paths.path(PROMPT, "", trajectory, {}))
    return READER.reading.reward(logits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch_limit", "kv_tokens"), [(1, 4000), (64, 4000), (64, 110), (5, 75)])
def test_incremental_scores_are_scores_from_scratch(batch_limit: int, kv_tokens: int) -> None:
    """Rewards are bit-equal one or many at once, with ample and little KV."""
    engine, _ = scorer(batch_limit=batch_limit, kv_tokens=kv_tokens)
    trees = {f"tree{i}": random_trajectories(i) for i in range(3)}
    for level in range(4):
        for call, (tree, rounds) in enumerate(trees.items()):
            engine.score(call, tree, PROMPT, "", rounds[level])
        answers = finish(engine)
        for call, rounds in enumerate(trees.values()):
            assert answers[call] == [from_scratch(t) for t in rounds[level]]
        engine.cache.check()
    assert (engine.cache.evicted_tokens > 0) == (kv_tokens < 4000)


def test_only_new_tokens_are_computed() -> None:
    """A prompt is read once, then each round costs its own steps and tags."""
    engine, model = scorer()
    rounds = random_trajectories(7)
    for level, trajectories in enumerate(rounds):
        before = model.rows
        engine.score(level, "oak", PROMPT, "", trajectories)
        finish(engine)
        new = sum(len(t.steps[-1]) + 1 for t in trajectories)
        assert model.rows - before <= new + (len(PROMPT) if level == 0 else 0)
    assert engine.totals().prm_tokens == model.rows


def test_a_score_once_given_is_not_computed_again() -> None:
    """A path scored again, also in one call or under another node id, computes no rows."""
    engine, model = scorer()
    (first,) = random_trajectories(1, rounds=1, width=1)
    twin = Trajectory(99, first[0].steps, first[0].texts)
    engine.score(1, "oak", PROMPT, "", [*first, twin])
    reward, twin_reward = finish(engine)[1]
    rows = model.rows
    engine.score(2, "oak", PROMPT, "", [twin])
    assert finish(engine) == {2: [reward]}
    assert reward == twin_reward == from_scratch(first[0])
    assert model.rows == rows == len(PROMPT) + len(first[0].steps[0]) + 1


def test_pruned_and_released_trajectories_are_freed() -> None:
    """Dead nodes' KV is freed at once, a shared path's with its last node; the prompt stays."""
    engine, _ = scorer()
    steps = ((1, 2, 3), (1, 2, 4), (1, 2, 3))
    trajectories = [Trajectory(i + 1, (step,), ("",)) for i, step in enumerate(steps)]
    engine.score(1, "oak", PROMPT, "", trajectories)
    finish(engine)
    assert engine.cache.active_tokens == len(PROMPT) + 6
    engine.hint("oak", Hint(dead=(1,)))
    assert engine.cache.active_tokens == len(PROMPT) + 6
    engine.hint("oak", Hint(dead=(3,)))
    assert engine.cache.active_tokens == len(PROMPT) + 4
    engine.release("oak")
    assert (engine.cache.active_tokens, engine.cache.cached_tokens) == (0, len(PROMPT))
    engine.cache.check()


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_abort_frees_and_others_go_on(iterations: int) -> None:
    """Aborted at any iteration, a tree holds nothing, and others get their rewards."""
    engine, _ = scorer(batch_limit=4)
    oak_paths, elm_paths = random_trajectories(1)[0], random_trajectories(2)[0]
    engine.score(1, "oak", PROMPT, "", oak_paths)
    engine.score(2, "elm", PROMPT, "", elm_paths)
    answers = dict(done for _ in range(iterations) for done in engine.step())
    assert 1 in answers or engine.abort("oak") == [1]
    engine.release("oak")
    assert engine.cache.tokens_of("oak") == 0
    engine.cache.check()
    answers |= finish(engine)
    assert answers[2] == [from_scratch(t) for t in elm_paths]


def test_a_path_that_cannot_fit_is_refused_with_both_sizes() -> None:
    """The error names length and room; an unknown token id is refused too."""
    engine, _ = scorer(kv_tokens=30)
    long = Trajectory(1, (tuple(range(20)),), ("",))
    with pytest.raises(PrefixTooLong, match=r"45 tokens .* prm_kv_tokens of 30"):
        engine.score(1, "oak", PROMPT, "", [long])
    with pytest.raises(EngineError, match=f"token id {VOCAB}"):
        engine.score(2, "oak", PROMPT, "", [Trajectory(1, ((VOCAB,),), ("",))])
    assert not engine.busy


@pytest.mark.promise(
    "A step drawn ahead is scored in the same pass as the step before it, and its reward is kept "
    "until requested."
)
def test_a_step_ahead_is_scored_in_the_pass_of_the_one_before() -> None:
    """Both rewards come from one pass, bit for bit; the second one costs nothing when requested."""
    first, second = (1, 2, 3), (4, 5, 6, 7)
    shorter = Trajectory(1, (first,), ("",))
    longer = Trajectory(9, (first, second), ("", ""))
    engine, model = scorer()
    engine.score(1, "oak", PROMPT, "", [shorter], {1: longer})
    assert [rewards for _, rewards in engine.step()] == [[from_scratch(shorter)]]
    rows = model.rows
    engine.score(2, "oak", PROMPT, "", [longer])
    assert finish(engine) == {2: [from_scratch(longer)]}
    assert model.rows == rows
    engine.cache.check()


def test_a_step_ahead_may_come_later_or_not_at_all() -> None:
    """A requested score does not wait for a long step ahead; a step too long for the pool is left
    out; dead nodes' KV is freed."""
    short = Trajectory(1, ((1, 2),), ("",))
    ahead = Trajectory(1, ((1, 2), tuple(random.Random(1).choices(range(26), k=300))), ("", ""))
    engine, _ = scorer()
    engine.score(1, "oak", PROMPT, "", [short], {1: ahead})
    assert finish(engine) == {1: [from_scratch(short)]}
    assert engine.batch.sequences
    engine.score(2, "oak", PROMPT, "", [replace(ahead, node=2)])
    assert finish(engine) == {2: [from_scratch(ahead)]}
    engine.hint("oak", Hint(dead=(1, 2)))
    engine.cache.check()
    assert engine.cache.active_tokens == len(PROMPT)
    small, _ = scorer(kv_tokens=60)
    small.score(1, "oak", PROMPT, "", [short], {1: ahead})
    assert finish(small) == {1: [from_scratch(short)]}
    assert not small.batch.sequences
    small.cache.check()
