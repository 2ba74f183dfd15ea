"""A malformed message or a fault anywhere ends its own call with an error; others go on."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import deque
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.embedded.options import EngineOptions
from runtime.embedded.pipe import (
    MOST_AT_ONCE,
    Done,
    Embed,
    Envelope,
    Expand,
    Release,
    Score,
    StepWords,
    ToEngine,
    TreeHint,
    in_parts,
    seal,
)
from search.controller import search
from search.engine import (
    Ahead,
    Branch,
    CallFault,
    EngineError,
    Hint,
    PrefixTooLong,
    Sampling,
    Trajectory,
)
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import ROOT
from tests.runtime.inline_engine_loop import InlineWorker
from tests.runtime.tiny_models import make_checkpoint

SPEC = SearchSpec(
    policy="ets", width=6, seed=5, max_depth=3, max_step_tokens=6, cluster_threshold=0.3
)
SAMPLING = Sampling(max_step_tokens=6)
PROMPT = tuple(range(40, 60))
TREE = "bad"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InlineWorker:
    """An engine with little memory, few places and every feature on."""
    folder: Path = tmp_path_factory.mktemp("models")
    options = EngineOptions(
        policy=make_checkpoint(folder / "policy", seed=1),
        prm=make_checkpoint(folder / "prm", seed=2),
        kv_tokens=512,
        prm_kv_tokens=512,
        batch_limit=8,
        threads=1,
        speculate=True,
        embedder="hidden",
    )
    return InlineWorker(options)


def grow(engine: InlineWorker) -> str:
    """Run the bystander's search and return its digest."""
    outcome = asyncio.run(
        search(
            Problem(PROMPT, "1 + 1?", "\n\n"),
            SPEC,
            engine,
            tree_id="bystander",
            answer_of=lambda text: text[-1:] or None,
            clock=lambda: 0.0,
        )
    )
    return outcome.digest


@pytest.fixture(scope="module")
def alone(engine: InlineWorker) -> str:
    """The bystander's digest when it runs alone."""
    return grow(engine)


def round_of(call: int, tokens: tuple[int, ...] = PROMPT, count: int = 3) -> Expand:
    """A valid Expand call of ``count`` branches."""
    ahead = Ahead(7, (0,), 2, 40)
    branches = tuple(Branch(ROOT, i, tokens, 9 + i, 6, i + 1, ahead) for i in range(count))
    return Expand(call, TREE, branches, SAMPLING)


SOUND: tuple[ToEngine, ...] = (
    round_of(1),
    Score(1, TREE, PROMPT, "1?", (Trajectory(1, ((50, 51), (52,)), ("a", "b"), 3),)),
    Embed(1, TREE, (StepWords((50, 51), "a"), StepWords((52,), "b"))),
    TreeHint(TREE, Hint({1: 0.5, 2: 0.25}, (1,), (2,), (1, 2))),
    Release(1, TREE),
)
HOSTILE = st.sampled_from(
    [
        *("", "\ud800", "a\0b", "x" * 5000, b"", None, True, (), [], {}, object, Hint, ROOT),
        *(-1, 0, 1, 1 << 22, 1 << 31, 1 << 63, 1 << 64, 10**400, -(10**400)),
        *(math.nan, math.inf, -math.inf, 0.5, 1e308, 5e-324, "\n\n", ("\n", ""), ("\ud800",)),
        *((1, "a"), (1.5,), (True,), (1, 10**30), (-1,), (999,), ((1,), (2, 3)), (1,) * 600),
        *((7,) * 40, ("a",) * 99, ("ab" * 50_000,), {1: math.nan}, {-1: 0.5}, {"a": 1}),
    ]
)


def spoilt(value: Any, draw: st.DataObject) -> Any:
    """``value`` with one of its parts, at any depth, or all of it replaced by a hostile value."""
    parts: list[Any] = []
    if is_dataclass(value):
        parts = [field.name for field in fields(value)]
    elif isinstance(value, tuple):
        parts = list(range(len(value)))
    where = draw.draw(st.sampled_from([None, *parts])) if parts else None
    if where is None:
        return draw.draw(HOSTILE)
    if isinstance(value, tuple):
        return (*value[:where], spoilt(value[where], draw), *value[where + 1 :])
    return replace(value, **{where: spoilt(getattr(value, where), draw)})


def answers(engine: InlineWorker) -> dict[int, Done | EngineError]:
    """Take the replies to the test's own messages, checking that each has exactly one."""
    replies = {call: reply for call, [reply] in engine.pipe.replies.items()}
    engine.pipe.replies.clear()
    for reply in replies.values():
        assert isinstance(reply, Done) or isinstance(reply.error, EngineError)
    return {n: reply if isinstance(reply, Done) else reply.error for n, reply in replies.items()}


def must_hold_nothing(engine: InlineWorker) -> None:
    """Check that the accounting is right and that no search is left."""
    engine.worker._check_accounting(fatal=True)
    usage = engine.worker._usage()
    assert (usage.running, usage.waiting, usage.kv_tokens_active) == (0, 0, 0)
    assert usage.prm_kv_tokens_active == 0
    scheduler, scorer = engine.worker._scheduler, engine.worker._scorer
    assert scorer is not None
    assert not scheduler.searches
    assert not scorer.searches


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_malformed_messages_end_their_own_calls(
    engine: InlineWorker, alone: str, data: st.DataObject
) -> None:
    """Each of twelve malformed messages gets one reply, and the bystander's digest is unchanged."""
    messages: list[Any] = []
    for call in range(1, 13):
        sound = data.draw(st.sampled_from(SOUND))
        bad = spoilt(sound, data) if data.draw(st.integers(0, 3)) else sound
        message = bad if type(bad) is type(sound) else sound
        messages.append(message if isinstance(message, TreeHint) else replace(message, call=call))
    queue = deque(messages)
    engine.on_turn = lambda: engine.pipe.inbox.append(queue.popleft()) if queue else None
    assert grow(engine) == alone
    engine.on_turn = lambda: None
    engine.pipe.inbox += queue
    engine.work()
    replies = answers(engine)
    assert set(replies) == {
        message.call for message in messages if not isinstance(message, TreeHint)
    }
    trees = {message.tree for message in messages if isinstance(message.tree, str)}
    engine.pipe.inbox += [Release(call, tree) for call, tree in enumerate(trees)]
    engine.work()
    answers(engine)
    must_hold_nothing(engine)


def breaks(engine: InlineWorker, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a method of the engine raise RuntimeError whenever it works for ``TREE``; ``abort`` and
    ``release`` only once."""
    worker = engine.worker
    scheduler, scorer, embedder = worker._scheduler, worker._scorer, worker._embedder
    part: object = {
        "hint": scheduler.cache.evictor,
        "end_step": scheduler.cache.evictor,
        "finish": scheduler.steps,
        "step": scheduler.steps,
        "changed_steps": scheduler.cache.radix,
        "_read": scorer,
        "_settle": scorer,
        "_charge": embedder,
        "expand": scheduler,
        "abort": scheduler,
        "release": scheduler,
    }[stage]
    works = getattr(part, stage)
    times = 1 if stage in ("abort", "release") else 99

    def fails(*args: Any) -> Any:
        nonlocal times
        if times and any(TREE in trees_of(value) for value in args):
            times -= 1
            raise RuntimeError("a broken part")
        return works(*args)

    monkeypatch.setattr(part, stage, fails)


def trees_of(value: Any) -> set[str]:
    """The names of the trees that an argument refers to."""
    if isinstance(value, str):
        return {value}
    of = (value, getattr(value, "call", None), getattr(value, "sequence", None))
    return {tree for part in of if (tree := getattr(part, "tree", None))}


@pytest.mark.parametrize(
    ("stage", "failing"),
    [
        ("expand", {1}),
        ("end_step", {1}),
        ("finish", {1}),
        ("step", {1}),
        ("changed_steps", {1}),
        ("_settle", {2}),
        ("_read", {2}),
        ("_charge", {3}),
        ("hint", {1}),
        ("abort", {4}),
        ("release", {4}),
    ],
)
def test_a_fault_ends_its_own_call(
    engine: InlineWorker,
    alone: str,
    stage: str,
    failing: set[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault gives CallFault, is counted and is logged once with tree and cause; nothing leaks."""
    breaks(engine, stage, monkeypatch)
    expand, score, embed, hint, release = SOUND
    before = engine.worker._usage().totals.call_errors
    numbered = [expand, replace(score, call=2), replace(embed, call=3), replace(release, call=4)]
    queue = deque([numbered[0], hint, *numbered[1:]])

    def send_next() -> None:
        """Send the next message if the last one is answered."""
        done = max(engine.pipe.replies.keys() & {1, 2, 3, 4}, default=0)
        if queue and (isinstance(queue[0], TreeHint) or queue[0].call == done + 1):
            engine.pipe.inbox.append(queue.popleft())

    engine.on_turn = send_next
    assert grow(engine) == alone
    while queue:
        send_next()
        engine.work()
    replies = answers(engine)
    assert set(replies) == {1, 2, 3, 4}
    assert {call for call, reply in replies.items() if isinstance(reply, CallFault)} == failing
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == engine.worker._usage().totals.call_errors - before == 1
    engine.on_turn = lambda: None
    assert "tree 'bad', call " in logged[0].getMessage()
    assert "a broken part" in str(logged[0].exc_info)
    must_hold_nothing(engine)


def test_accounting_errors_end_the_process(
    engine: InlineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost slot raises AssertionError, because it affects all searches."""
    breaks(engine, "step", monkeypatch)
    pool = engine.worker._scheduler.cache.pool
    lost = pool.allocate(1)
    engine.pipe.inbox.append(SOUND[0])
    with pytest.raises(AssertionError, match="a slot is lost"):
        engine.work()
    pool.free(lost)
    must_hold_nothing(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": Sampling(stop=("\ud800",))}, r"stop: holds '\\ud800', half a character"),
        ({"sampling": Sampling(stop=("a",) * 33)}, "stop: 33 of them; at most 32"),
        ({"sampling": Sampling(stop=("a" * 70_000,))}, "stop: 70000 bytes in all; at most 65536"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature: nan; 0 or more is needed"),
        ({"branches": round_of(1).branches * 999}, "branches: 2997 of them; at most 1024"),
        ({"tree": ["oak"]}, "tree: list; text is needed"),
        ({"tree": "oak\0judged"}, "tree: holds a zero byte"),
    ],
)
def test_what_is_malformed_is_named(
    engine: InlineWorker, change: dict[str, Any], message: str
) -> None:
    """The error names the field, its value and what is allowed."""
    engine.pipe.inbox.append(replace(round_of(1), **change))
    engine.work()
    with pytest.raises(EngineError, match=message):
        raise answers(engine)[1]  # type: ignore[misc]


@pytest.mark.parametrize("message", ["a word", None, Release(None, "oak"), Release("1", "oak")])
def test_what_is_no_call_is_logged(
    engine: InlineWorker, message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A message without a valid call number is logged and gets no reply."""
    engine.pipe.inbox.append(message)
    engine.work()
    assert not answers(engine)
    assert len(caplog.records) == 1


async def test_ordinary_refusals_are_no_faults(
    engine: InlineWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal of a well-formed request is not logged."""
    with pytest.raises(PrefixTooLong):
        await engine.expand("oak", round_of(1, (1,) * 600).branches, SAMPLING)
    assert not caplog.records


def largest() -> dict[str, ToEngine]:
    """The largest messages that are allowed, with all prefixes and steps different."""
    paths = [(i % 200, i // 200, *(n % 199 for n in range(498))) for i in range(MOST_AT_ONCE)]
    branches = tuple(Branch(i, 0, path, i, 6, i + 9999) for i, path in enumerate(paths))
    steps = [path[:63] for path in paths]
    texts = ["".join(chr(97 + n % 26) for n in step) for step in steps]
    many = tuple(range(65_536))
    return {
        "expand": Expand(1, TREE, branches, Sampling(stop=("ab" * 128,) * 16, max_step_tokens=6)),
        "score": Score(
            2,
            TREE,
            PROMPT,
            "",
            tuple(Trajectory(i, (steps[i],), (texts[i],)) for i in range(MOST_AT_ONCE)),
        ),
        "hint": TreeHint(TREE, Hint(dict.fromkeys(many, 0.5), many, many, many)),
        "embed": Embed(3, TREE, tuple(map(StepWords, steps, texts))),
        "release": Release(4, TREE),
    }


def test_no_message_holds_the_loop_for_long(engine: InlineWorker) -> None:
    """Receiving the largest message of any kind takes less than 0.25 s of thread time."""
    seconds: dict[str, float] = {}
    messages = largest()
    gc.collect()
    gc.freeze()  # as the engine's process does, so objects of other tests are not scanned
    for kind, message in messages.items():
        data = bytes(seal(message))
        before = time.thread_time()
        engine.worker._receive(Envelope.of(data))
        seconds[kind] = time.thread_time() - before
    gc.unfreeze()
    assert max(seconds.values()) < 0.25, seconds
    replies = answers(engine)
    assert {call for call, reply in replies.items() if isinstance(reply, Done)} == {4}
    assert all("was aborted" in str(replies[call]) for call in (1, 2, 3))
    must_hold_nothing(engine)


@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_parts_hold_what_a_message_may(sizes: list[int], most: int) -> None:
    """Parts keep all items in order, exceed ``most`` only by a single item, and are filled up."""
    items = list(range(len(sizes)))
    parts = in_parts(items, sizes, most)
    assert [item for part in parts for item in part] == items
    totals = [sum(sizes[item] for item in part) for part in parts]
    assert all(size <= most or len(part) == 1 for size, part in zip(totals, parts, strict=True))
    assert all(
        size + sizes[after[0]] > most for size, after in zip(totals[:-1], parts[1:], strict=True)
    )
