"""The policy as judge: prompt, votes and numbers; beside other work and in the reference."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.reference_engine import ReferenceEngine, ReferenceOptions
from models.train.judge_prompts import judge_prompt
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.judge import Judge
from runtime.reward_format import REWARD_FORMATS
from runtime.text import Text
from search.engine import Branch, EngineError, Hint, PrefixTooLong, Sampling, Trajectory
from search.tree import ROOT, node_seed
from tests.closing import closing
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

GENERATIVE = REWARD_FORMATS["generative"]
QUESTION = "Use 4 9 10 13 to make 24."
STEPS = ("13 - 9 = 4 (left: 4 4 10)\n\n", "10 - 4 = 6 (left: 4 6)\n\n")
SPRIG = Text("models/sprig/policy")


def judge(**changes: object) -> Judge:
    """The bundled policy's judge, with these changes to its format."""
    return Judge(GENERATIVE.model_copy(update=changes), SPRIG)


def trajectory_of(*texts: str, node: int = 1, seed: int = 0) -> Trajectory:
    """A trajectory of these texts."""
    return Trajectory(node, tuple(tuple(SPRIG.encode(t)) or (2,) for t in texts), texts, seed)


def test_the_prompt_is_the_one_the_bundled_policy_learnt() -> None:
    """The prompt is a user message with question and steps, stripped, a paragraph each; empty steps
    are left out."""
    content = judge_prompt(QUESTION, [step.strip() for step in STEPS])
    expected = SPRIG.encode_chat([{"role": "user", "content": content}])
    assert list(judge().prompt(QUESTION, trajectory_of(*STEPS))) == expected
    assert list(judge().prompt(QUESTION, trajectory_of(*STEPS, ""))) == expected


def test_words_put_into_the_template_are_left_alone() -> None:
    """Placeholders in a question or a step are not filled."""
    prompt = judge().prompt("What is {steps}?", trajectory_of("{question}\n\n"))
    text = SPRIG.decode(prompt)
    assert "What is {steps}?\n\n{question}\n\nHow surely" in text


@pytest.mark.parametrize(
    ("verdict", "number"),
    [
        ("Step 1 is good.\n\nThe number is 8.", 8),
        ("The number is 3. No: the number is 10.", 10),
        ("The number is: 1", 1),
        ("The number is 11.", None),
        ("The number is 0.", None),
        ("The number is ²", None),
        ("Step 1 is good.", None),
        ("", None),
    ],
)
def test_the_last_number_in_range_counts(verdict: str, number: int | None) -> None:
    """The last match counts; if its number is out of range the verdict has none."""
    assert judge().number(verdict) == number


def test_rewards_by_hand() -> None:
    """A vote is (number - 1) / 9; the mean is over votes with a number: 10, 1, none give 0.5."""
    ten, one, none = "The number is 10.", "The number is 1.", "I cannot say."
    assert judge().judge([ten]) == (1.0, 0)
    assert judge().judge([one]) == (0.0, 0)
    assert judge().judge([ten, none, one]) == (0.5, 1)
    assert judge().judge(["The number is 4.", "The number is 7."]) == (0.5, 0)
    assert judge().judge([none, none]) == (0.0, 2)
    assert judge(unparsed=0.25).judge([none]) == (0.25, 1)


@given(numbers=st.lists(st.one_of(st.integers(1, 10), st.none()), min_size=1, max_size=8))
def test_a_reward_is_in_its_range_whatever_is_said(numbers: list[int | None]) -> None:
    """Votes without a number change only the count of unparsed votes."""
    verdicts = ["?" if n is None else f"The number is {n}." for n in numbers]
    votes = [n for n in numbers if n is not None]
    reward, unparsed = judge(unparsed=0.5).judge(verdicts)
    assert unparsed == len(numbers) - len(votes)
    assert reward == pytest.approx(sum(n - 1 for n in votes) / 9 / len(votes) if votes else 0.5)


def test_votes_have_seeds_of_their_own() -> None:
    """Votes' seeds depend on the trajectory's seed alone and differ from each other."""
    seeds = judge(votes=4).seeds(trajectory_of(*STEPS, seed=5))
    assert seeds == judge(votes=4).seeds(trajectory_of(*STEPS, node=9, seed=5))
    assert len({*seeds, *judge(votes=4).seeds(trajectory_of(*STEPS, seed=6))}) == 8


PROMPT = tuple(make_tokenizer().encode("<|user|>What?<|end|><|assistant|>"))
DIGITS = r"""{
    "extends": "generative", "votes": 3, "verdict_tokens": 24,
    "pattern": "([0-9A-Za-z])", "template": "{question}|{steps}", "unparsed": 0.125
}"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A random policy, and a format whose pattern finds numbers in some of its random text."""
    folder: Path = tmp_path_factory.mktemp("judge")
    (folder / "digits.json").write_text(DIGITS)
    return EngineOptions(
        make_checkpoint(folder / "policy", seed=1),
        reward_format=str(folder / "digits.json"),
        kv_tokens=4000,
        batch_limit=1,
        threads=1,
        strict=True,
    )


def paths(count: int = 6) -> list[Trajectory]:
    """Short trajectories of distinct letters, with seeds as a search sets them."""
    ids = [(65 + n, 66, 67 + n) for n in range(count)]
    texts = [make_tokenizer().decode(step) for step in ids]
    return [
        Trajectory(n + 1, (ids[n],), (texts[n],), node_seed(7, "judge", (n,))) for n in range(count)
    ]


@pytest.mark.promise(
    "A judge's tokens count apart from the tree's, and its rewards are the same alone and beside "
    "other work."
)
@pytest.mark.slow
async def test_the_same_verdicts_in_company_and_in_the_reference(
    options: EngineOptions,
) -> None:
    """Rewards are equal one at a time, all at once beside drawn steps, and on plain transformers.
    A judge's tokens are counted apart from the tree's, and nothing stays held."""
    async with closing(await EmbeddedEngine.start(options)) as alone:
        assert alone.capabilities.scores
        rewards = [(await alone.score("oak", PROMPT, "Q", [path]))[0] for path in paths()]
        cost = await alone.release("oak")
    assert len(set(rewards)) > 2
    assert cost.decoded_tokens == cost.prefilled_tokens == 0
    assert cost.prm_tokens > 0
    assert cost.model_calls > 0
    async with closing(await EmbeddedEngine.start(replace(options, batch_limit=32))) as crowd:
        sampling = Sampling(max_step_tokens=12)
        branches = [Branch(ROOT, i, PROMPT, i, 12, i + 1) for i in range(12)]
        steps, together = await asyncio.gather(
            crowd.expand("oak", branches, sampling), crowd.score("oak", PROMPT, "Q", paths())
        )
        assert together == rewards
        crowd.hint("oak", Hint(dead=(1, 2, 3)))
        crowd_cost = await crowd.release("oak")
        usage = await crowd.usage()
        assert crowd_cost.decoded_tokens == sum(len(step.tokens) for step in steps)
        assert crowd_cost.unparsed_verdicts == cost.unparsed_verdicts
        assert usage.kv_tokens_active == 0
        assert usage.totals.prm_tokens == crowd_cost.prm_tokens
        assert usage.totals.decoded_tokens == crowd_cost.decoded_tokens
        assert usage.totals.verdicts == 18
        assert usage.totals.unparsed_verdicts == crowd_cost.unparsed_verdicts
        assert usage.totals.rehydrated_tokens == 0
    reference = ReferenceEngine(
        ReferenceOptions(options.policy, reward_format=options.reward_format)
    )
    assert await reference.score("oak", PROMPT, "Q", paths()) == pytest.approx(rewards)


@pytest.mark.slow
async def test_abort_and_refusal_leave_nothing(options: EngineOptions) -> None:
    """An aborted judge's caller gets EngineError; a path without room for a verdict is refused."""
    async with closing(await EmbeddedEngine.start(options)) as engine:
        waiting = asyncio.create_task(engine.score("oak", PROMPT, "Q", paths(40)))
        await asyncio.sleep(0)
        await engine.abort("oak")
        with pytest.raises(EngineError, match="tree 'oak' was aborted"):
            await waiting
        assert (await engine.usage()).kv_tokens_active == 0
        with pytest.raises(PrefixTooLong, match=r"judge: .* do not fit the context of 512"):
            await engine.score("elm", PROMPT, "Q" * 600, paths(1))
        assert len(await engine.score("elm", PROMPT, "Q", paths(2))) == 2


@pytest.mark.slow
async def test_a_template_that_fills_the_context_is_refused_at_start(
    options: EngineOptions, tmp_path: Path
) -> None:
    """A template and verdict that exceed the context are refused at start."""
    file = tmp_path / "long.json"
    file.write_text('{"extends": "generative", "verdict_tokens": 512}')
    message = r"'long': template and verdict_tokens take \d+ tokens; .* holds 512"
    with pytest.raises(ValueError, match=message):
        await EmbeddedEngine.start(replace(options, reward_format=str(file)))
