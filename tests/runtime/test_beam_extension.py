"""Children drawn before a round asks for them: the same tree, sooner, with correct accounting."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from runtime.embedded.beam_extension import TRIAL_TOKENS, pays
from runtime.embedded.choices import KvPolicy
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.sequence import BranchSequence
from search.engine import Ahead, Branch, Hint, Sampling
from search.outcome import Outcome
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.tree import ROOT, Finish, step_seed
from tests.runtime.hash_model import naive_step
from tests.runtime.inline_engine import InlineEngine, grow
from tests.runtime.scheduler_support import PROMPTS, finish, scheduler

PROMPT = PROMPTS["tree3"]
SAMPLING = Sampling(temperature=0.9, top_p=0.95, max_step_tokens=40)
ALL = tuple(
    SearchSpec(
        policy=policy,
        width=9,
        seed=seed,
        max_depth=5,
        max_step_tokens=24,
        trajectory_tokens=90,
        expansions=12,
        enough_answers=9,
    )
    for seed, policy in enumerate(POLICIES)
)
LONG = ALL[0].model_copy(update={"policy": "rebase", "step_tokens": 7, "max_step_tokens": 7})


def round_of(
    parents: dict[int, tuple[tuple[int, ...], tuple[int, ...]]], first: int, ahead: int, seed: int
) -> list[Branch]:
    """Branches for two children of each parent. ``parents``: prefix and path by node id."""
    branches = []
    for parent, (tokens, path) in parents.items():
        for child in range(2):
            below = (*path, child)
            follow = Ahead(seed, below, ahead, 200)
            node = first + len(branches)
            branches.append(Branch(parent, child, tokens, step_seed(seed, below), 40, node, follow))
    return branches


def first_round(engine: Scheduler, tree: str, *, ahead: int = 2, seed: int = 1) -> list[Branch]:
    """Request six children of the root and return their branches."""
    branches = [
        Branch(ROOT, i, PROMPT, step_seed(seed, (i,)), 40, i + 1, Ahead(seed, (i,), ahead, 200))
        for i in range(6)
    ]
    engine.expand(1, tree, branches, SAMPLING)
    return branches


def early_tokens(engine: Scheduler) -> int:
    """The number of tokens drawn early that no round has asked for."""
    return sum(len(run.output) for run in engine.beam_extension.sequences())


async def digests(engine: InlineEngine, specs: tuple[SearchSpec, ...]) -> list[str]:
    """Run all searches at once, check that no KV is held afterwards, and return their digests."""
    outcomes = await asyncio.gather(*(grow(engine, PROMPT, spec) for spec in specs))
    engine.policy.cache.check()
    engine.prm.cache.check()
    for cache in (engine.policy.cache, engine.prm.cache):
        assert not cache.sequences
        assert cache.active_tokens == 0
    return [outcome.digest for outcome in outcomes]


SWITCHED = {
    "speculate": {"speculate": True},
    "both, few places": {"speculate": True, "lookahead": True, "batch_limit": 4},
    "both, little memory": {"speculate": True, "lookahead": True, "kv_tokens": 700},
}
TIGHT = {"speculate": True, "lookahead": True, "kv_tokens": 150}


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """Digests of every policy's tree, each alone, without speculation and look-ahead."""
    return [asyncio.run(digests(InlineEngine(), (spec,)))[0] for spec in (*ALL, LONG)]


@pytest.mark.promise(
    "Speculative expansion changes no tree: each policy grows the same one with ample and with "
    "little KV."
)
@pytest.mark.parametrize("switches", SWITCHED)
def test_every_policy_grows_the_same_tree(switches: str, plain: list[str]) -> None:
    """All searches at once, with ample and little memory: no switch changes a digest."""
    engine = InlineEngine(**SWITCHED[switches])
    assert asyncio.run(digests(engine, (*ALL, LONG))) == plain
    total = engine.policy.totals()
    assert total.speculated_used > 0
    assert total.decoded_tokens >= total.speculated_used + total.speculated_wasted
    assert (engine.policy.cache.evicted_tokens > 0) == ("memory" in switches)


@pytest.mark.slow
@pytest.mark.parametrize("kv_policy", ["lru", "arborkv"])
def test_a_pool_for_one_path_grows_the_same_tree(kv_policy: KvPolicy, plain: list[str]) -> None:
    """In a pool for one path early sequences are dropped repeatedly and the trees stay the same."""
    engine = InlineEngine(**TIGHT, kv_policy=kv_policy)
    assert asyncio.run(digests(engine, (*ALL, LONG))) == plain


def test_what_runs_ahead_is_used_and_saves_iterations() -> None:
    """Speculation takes fewer iterations for the same tree and draws no used token twice."""

    async def iterations(speculate: bool) -> tuple[int, InlineEngine, int]:
        turns = 0

        def count() -> None:
            nonlocal turns
            turns += 1

        engine = InlineEngine(speculate=speculate, on_step=count)
        spec = SearchSpec(policy="beam", width=64, seed=2, max_step_tokens=24, max_depth=6)
        outcome = await grow(engine, PROMPT, spec)
        return turns, engine, outcome.stats.generated_tokens

    slow, _, tokens = asyncio.run(iterations(False))
    fast, engine, same = asyncio.run(iterations(True))
    assert tokens == same
    total = engine.policy.totals()
    assert total.speculated_used > 0
    assert total.decoded_tokens == tokens + total.speculated_wasted
    assert fast < slow


def test_an_early_child_is_the_child_that_the_round_draws() -> None:
    """A step taken over whole or half drawn equals the step drawn alone."""
    engine, _ = scheduler(speculate=True)
    branches = first_round(engine, "oak")
    steps = finish(engine)[1]
    open_steps = {
        b.node: ((*b.tokens, *s.tokens), (b.child,))
        for b, s in zip(branches, steps, strict=True)
        if s.finish is not Finish.END
    }
    assert early_tokens(engine) > 0
    next_round = round_of(open_steps, 100, 2, 1)
    engine.expand(2, "oak", next_round, SAMPLING)
    used = engine.searches["oak"].counters.speculated_used
    assert used > 0
    for branch, step in zip(next_round, finish(engine)[2], strict=True):
        assert step == naive_step(branch, SAMPLING)
    engine.abort("oak")
    account = engine.release("oak")
    assert account is not None
    assert account.speculated_used == used
    engine.cache.check()
    assert not engine.cache.sequences


def test_passes_saved_are_what_a_round_is_shorter_by() -> None:
    """A round saves its longest step less the most that any step had left to draw at its start."""
    engine, _ = scheduler(speculate=True)
    branches = first_round(engine, "oak")
    steps = finish(engine)[1]
    assert engine.searches["oak"].passes_saved == 0, "nothing was there early"
    open_steps = {
        b.node: ((*b.tokens, *s.tokens), (b.child,))
        for b, s in zip(branches, steps, strict=True)
        if s.finish is not Finish.END
    }
    early = {
        (run.branch.parent, run.branch.child): run for run in engine.beam_extension.sequences()
    }
    early_lengths = {place: len(run.output) for place, run in early.items()}
    next_round = round_of(open_steps, 100, 2, 1)
    engine.expand(2, "oak", next_round, SAMPLING)
    lengths = [len(step.tokens) for step in finish(engine)[2]]
    places = [(branch.parent, branch.child) for branch in next_round]
    remaining = [n - early_lengths.get(place, 0) for n, place in zip(lengths, places, strict=True)]
    saved = engine.searches["oak"].passes_saved
    assert saved == max(lengths) - max(remaining) > 0


def test_rows_are_wasted_while_passes_saved_are_worth_them() -> None:
    """A search may waste 64 rows, or 16 for each pass saved; beyond that it draws nothing early."""
    assert pays(0, 63)
    assert not pays(0, 64)
    assert pays(5, 80)
    assert not pays(5, 81)
    engine, _ = scheduler(speculate=True)
    first_round(engine, "oak")
    engine.searches["oak"].counters.speculated_wasted = TRIAL_TOKENS
    finish(engine)
    assert early_tokens(engine) == 0
    assert not engine.beam_extension.wanting()


def until_early(engine: Scheduler, tokens: int = 4) -> None:
    """Step until ``tokens`` tokens are drawn early while real work still runs."""
    while engine.busy and early_tokens(engine) < tokens:
        engine.step()
    assert engine.busy
    assert early_tokens(engine) >= tokens


@pytest.mark.promise(
    "Requested branches take the places of speculative ones in the next iteration, and no token "
    "drawn early is lost."
)
def test_real_work_takes_the_places_in_the_next_iteration() -> None:
    """When a second search asks, its branches replace all early sequences in the next batch."""
    engine, _ = scheduler(speculate=True, batch_limit=6)
    first_round(engine, "oak")
    until_early(engine)
    assert any(sequence.preemptible for sequence in engine.batch.sequences)
    tokens = early_tokens(engine)
    branches = [Branch(ROOT, i, PROMPTS["tree5"], step_seed(9, (i,)), 40, i + 1) for i in range(6)]
    engine.expand(2, "elm", branches, SAMPLING)
    engine.step()
    assert not any(sequence.preemptible for sequence in engine.batch.sequences)
    assert engine.searches["elm"].counters.prefilled_tokens >= len(PROMPTS["tree5"])
    assert early_tokens(engine) == tokens
    engine.cache.check()


@pytest.mark.promise(
    "Slots for requested branches come from speculative KV before any other KV is evicted, and no"
    " token drawn early is lost."
)
def test_early_kv_goes_before_any_other() -> None:
    """For slots the batch drops early sequences' KV and evicts nothing; their tokens are kept."""
    engine, _ = scheduler(speculate=True)
    first_round(engine, "oak")
    until_early(engine, 20)
    tokens, evicted = early_tokens(engine), engine.cache.evicted_tokens
    sequence = next(sequence for sequence in engine.batch.sequences if not sequence.preemptible)
    spare = engine.cache.pool.allocate(engine.cache.pool.available)
    dropped = engine.batch.drop_preemptible(sequence, sequence.missing + 3)
    assert engine.cache.reserve(sequence, sequence.missing + 3)
    engine.cache.pool.free(spare)
    assert engine.cache.evicted_tokens == evicted
    assert early_tokens(engine) == tokens
    dropped += engine.batch.drop_preemptible()
    assert dropped
    assert not any(sequence.preemptible for sequence in engine.cache.sequences)
    assert not engine.batch.drop_preemptible()
    engine.cache.check()


@pytest.mark.promise(
    "An abort amid speculation, also of a search just pruned, frees all that was drawn early and "
    "counts it as wasted."
)
@pytest.mark.parametrize("end", ["abort", "dead"])
def test_an_end_amid_speculation_frees_everything(end: str) -> None:
    """An abort or a prune frees all early sequences and slots; their tokens count as wasted."""
    engine, _ = scheduler(speculate=True)
    first_round(engine, "oak")
    until_early(engine, 10)
    tokens = early_tokens(engine)
    if end == "abort":
        assert engine.abort("oak") == [1]
    else:
        engine.hint("oak", Hint(dead=tuple(range(1, 7))))
        engine.abort("oak")
    assert early_tokens(engine) == 0
    assert engine.searches["oak"].counters.speculated_wasted == tokens
    engine.cache.check()
    assert not engine.cache.sequences
    engine.release("oak")
    assert engine.cache.active_tokens == 0
    engine.cache.check()


def test_nothing_is_begun_below_what_has_been_pruned() -> None:
    """Nothing is drawn early below dead nodes, and a release leaves no sequence."""
    engine, _ = scheduler(speculate=True)
    first_round(engine, "oak", ahead=20)
    until_early(engine, 10)
    dead = {run.branch.parent for run in engine.beam_extension.sequences()}
    engine.hint("oak", Hint(dead=tuple(dead)))
    finish(engine)
    assert not dead & {run.branch.parent for run in engine.beam_extension.sequences()}
    engine.release("oak")
    assert not engine.cache.sequences
    engine.check()


def test_two_searches_share_the_slack() -> None:
    """While both have children left to draw early, their numbers of places differ by at most 1."""
    engine, _ = scheduler(speculate=True, batch_limit=14)
    for call, (tree, seed) in enumerate({"oak": 1, "elm": 2}.items(), 1):
        branches = [
            Branch(ROOT, i, PROMPT, step_seed(seed, (i,)), 40, i + 1, Ahead(seed, (i,), 8, 200))
            for i in range(7)
        ]
        engine.expand(call, tree, branches, SAMPLING)
    fill, shared = engine.beam_extension.fill_idle_places, []

    def checked() -> list[BranchSequence]:
        sequences = fill()
        spare = [sequence for sequence in engine.batch.sequences if sequence.preemptible]
        drawing = all(isinstance(sequence, BranchSequence) for sequence in spare)
        if drawing and engine.beam_extension.wanting() == {"oak", "elm"}:
            shared.append(Counter(sequence.tree for sequence in spare))
        return sequences

    engine.beam_extension.fill_idle_places = checked  # type: ignore[method-assign]
    finish(engine)
    assert any(places.total() > 3 for places in shared)
    assert all(abs(places["oak"] - places["elm"]) <= 1 for places in shared)
    engine.cache.check()


def test_what_differs_is_not_taken_over() -> None:
    """A child requested with another limit or sampling is drawn anew."""
    engine, _ = scheduler(speculate=True)
    branches = first_round(engine, "oak")
    steps = finish(engine)[1]
    branch, step = next(
        (b, s) for b, s in zip(branches, steps, strict=True) if s.finish is not Finish.END
    )
    (child, _) = round_of(
        {branch.node: ((*branch.tokens, *step.tokens), (branch.child,))}, 50, 1, 1
    )
    colder = replace(SAMPLING, temperature=0.4)
    engine.expand(2, "oak", [child], colder)
    assert finish(engine)[2] == [naive_step(child, colder)]
    assert engine.searches["oak"].counters.speculated_used == 0


async def test_a_search_aborted_while_its_slack_is_used_leaves_nothing() -> None:
    """A search cancelled at any iteration frees its early KV, and the other one goes on."""
    for cut in range(4, 40, 6):
        turns = 0
        engine = InlineEngine(speculate=True, lookahead=True, kv_tokens=600)
        tasks: list[asyncio.Task] = []

        def turn(engine: InlineEngine = engine, tasks: list = tasks, cut: int = cut) -> None:
            nonlocal turns
            turns += 1
            if turns == cut:
                tasks[0].cancel()

        engine.on_step = turn
        tasks += [asyncio.create_task(grow(engine, PROMPT, spec)) for spec in (ALL[2], LONG)]
        cancelled, whole = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError) or turns < cut
        assert isinstance(whole, Outcome)
        for cache in (engine.policy.cache, engine.prm.cache):
            cache.check()
            assert not cache.sequences
