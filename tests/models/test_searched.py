"""Trees that the reward model is trained on: how they grow, and which leaves are used."""

import random

import pytest
import torch

from models.tasks import TASKS
from models.train import searched
from models.train.batches import load_tokenizer
from models.train.checkpoint import load_model
from models.train.network import logits_at
from models.train.rows import scored_row, sign_ids
from models.train.searched import GrownTree, Path, Searcher, TreeRounds, telling
from models.train.tree_data import FOOLED, OTHERS

TOKENIZER = load_tokenizer()
(STEP_BREAK,) = TOKENIZER.encode("\n\n")
GAME = TASKS["game24"]
QUESTION = "Use 4 9 10 13 to make 24."
WIDTH = 6


@pytest.fixture(scope="module")
def trees() -> list[GrownTree]:
    """Trees for two questions, grown with the bundled models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searched, "WIDTH", WIDTH)
        searcher = Searcher(load_model("policy"), TOKENIZER)
        questions = [QUESTION, "Use 1 2 3 4 to make 24."]
        return searcher.trees(load_model("prm"), GAME, questions, random.Random(1))


def test_a_tree_ends_in_as_many_replies_as_it_is_wide(trees: list[GrownTree]) -> None:
    """A node without a child is a leaf too; every leaf has a reward."""
    for tree in trees:
        assert tree.frontier == []
        assert tree.ended == WIDTH
        finished = [leaf for leaf in tree.leaves if leaf.steps[-1][-1] != STEP_BREAK]
        assert len(finished) == WIDTH
        assert all(0.0 <= leaf.reward <= 1.0 for leaf in tree.leaves)


def test_rewards_are_the_reward_models(trees: list[GrownTree]) -> None:
    """Paths of many lengths have the same rewards in a batch as alone."""
    prm, signs = load_model("prm"), torch.tensor(sign_ids(TOKENIZER))
    for leaf in trees[0].leaves[:4]:
        (row,) = telling(TOKENIZER, "game24", QUESTION, [leaf], 0)
        ids = torch.tensor([scored_row(TOKENIZER, row).ids])
        where = torch.zeros_like(ids, dtype=torch.bool)
        where[0, -1] = True
        with torch.no_grad():
            reward = logits_at(prm, ids, where)[:, signs].softmax(-1)[0, 0].item()
        assert leaf.reward == pytest.approx(reward, abs=0.06)


def a_leaf(text: str, reward: float) -> Path:
    """A reply of one step, with the end token."""
    return Path(((*TOKENIZER.encode(text), TOKENIZER.eos_token_id),), reward)


def test_what_fooled_the_reward_model_is_learnt_first() -> None:
    """Wrong leaves come by falling reward, before right ones; a truncated step counts as wrong."""
    step = "13 - 9 = 4 (left: 4 4 10)"
    wrong = [
        a_leaf(f"13 - 9 = {claim} (left: 4 {claim} 10)", claim / 100) for claim in range(5, 15)
    ]
    right = a_leaf(step, 0.5)
    truncated = Path((tuple(TOKENIZER.encode(step)),), 0.99)
    rows = telling(TOKENIZER, "game24", QUESTION, [*wrong, right, truncated], 0)
    assert [row.labels for row in rows[: FOOLED + 1]] == [[False]] * FOOLED + [[True]]
    assert rows[0].steps[0] == list(truncated.steps[0])
    assert len(rows) == FOOLED + 1 + OTHERS


@pytest.mark.slow
def test_rounds_give_every_task_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task gets half of the sample, and half of the draws come from the last round."""
    rounds = TreeRounds(TOKENIZER, "cpu", ("game24", "countdown"), 1, 31)
    monkeypatch.setattr(searched, "WIDTH", 2)
    prm = load_model("prm")
    rounds.grow(prm, 1)
    rounds.grow(prm, 1)
    last = [row for task_rounds in rounds.rounds.values() for row in task_rounds[-1]]
    sample = rounds.draw(random.Random(2), 400)
    assert sum(row.task == "game24" for row in sample) == pytest.approx(200, abs=50)
    assert sum(any(row is recent for recent in last) for row in sample) == pytest.approx(
        300, abs=50
    )
