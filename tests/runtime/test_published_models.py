"""Every row of ``docs/models.md`` on the embedded engine: what transformers computes of the same
checkpoint, on a path of eight steps. ``-rP`` shows how far apart they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.catalog import public_policies, public_policy, public_reward_model, public_reward_models
from runtime.checkpoint import Checkpoint
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.reward_scorer import load_scorer
from search.engine import Trajectory
from tests.runtime.published_models import (
    CLASSES,
    EIGHT_STEPS,
    FORMATS,
    POLICIES,
    PUBLISHED,
    REWARDS,
    published_tensors,
    tensors_of,
    tiny,
)
from tests.runtime.test_reward_models import PROMPT, options, rewards_of
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

WITHIN = 1e-4
TOKENS = 24
IDS = [*PROMPT, *make_tokenizer().encode("".join(EIGHT_STEPS))]
PATHS = [
    Trajectory(
        count,
        tuple(tuple(make_tokenizer().encode(step)) for step in EIGHT_STEPS[:count]),
        EIGHT_STEPS[:count],
    )
    for count in range(1, 1 + len(EIGHT_STEPS))
]
"""One step, two steps, and so on to all eight."""


def test_every_row_has_its_checkpoint(tmp_path: Path) -> None:
    """Every row has a checkpoint of its class with tensors named as published, and is recognised by
    its name alone."""
    assert set(PUBLISHED) == set(CLASSES)
    by_name = {row.names[0]: row for row in (*public_policies(), *public_reward_models())}
    for name in PUBLISHED:
        for variant in range(len(PUBLISHED[name].variants)):
            folder = tiny(name, tmp_path / str(variant), variant)
            assert tensors_of(folder) == published_tensors(name, variant)
            assert Checkpoint.of(folder).architecture == CLASSES[name]
            row = by_name[name]
            lookup = public_policy if row in public_policies() else public_reward_model
            assert lookup(folder) is row


@pytest.mark.parametrize(("name", "variant"), POLICIES)
def test_a_policys_logits_and_tokens_are_transformers(
    name: str, variant: int, tmp_path: Path
) -> None:
    """The path's logits agree to WITHIN, and greedy tokens after it are equal."""
    folder = tiny(name, tmp_path, variant)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        theirs = model(ids).logits[0]
        expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    forward = Forward(folder, threads=1)
    slots = np.arange(len(IDS) + TOKENS)
    store = forward.new_store(len(slots))
    ours = forward.run([Span(np.array(IDS), 0, slots[: len(IDS)], 0)], store)
    largest = float((ours - theirs).abs().max())
    print(f"{name}, {variant}: {largest:.1e}")
    assert largest <= WITHIN
    tokens = [int(ours[-1].argmax())]
    while len(tokens) < TOKENS:
        at = len(IDS) + len(tokens)
        step = Span(np.array(tokens[-1:]), at - 1, slots[:at], 0)
        tokens.append(int(forward.run([step], store).argmax()))
    assert tokens == expected[0, len(IDS) :].tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_a_reward_models_rewards_are_transformers(name: str, tmp_path: Path) -> None:
    """Rewards of all eight steps agree, beside a policy with another tokenizer."""
    prm, form = tiny(name, tmp_path), FORMATS[name]
    scorer = load_scorer(options(make_checkpoint(tmp_path / "policy"), prm, form))
    assert scorer is not None
    rewards = rewards_of(scorer, 1, PATHS)
    expected = REWARDS[form](prm, EIGHT_STEPS)
    differences = [abs(ours - theirs) for ours, theirs in zip(rewards, expected, strict=True)]
    print(f"{name}: {max(differences):.1e}")
    assert max(differences) <= WITHIN
    assert len({round(reward, 3) for reward in rewards}) > 4
