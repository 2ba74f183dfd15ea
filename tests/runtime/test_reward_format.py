"""Reward formats: what the reward model reads and how its logits become a reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.reward_format import REWARD_FORMATS, TagReader, reward_format
from runtime.text import Text
from search.engine import RewardMissing
from tests.runtime.tiny_models import make_tokenizer

SHEPHERD = REWARD_FORMATS["math-shepherd"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A checkpoint's text side: tokenizer and a config that names its context."""
    folder: Path = tmp_path_factory.mktemp("words")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    return Text(folder)


def test_the_tag_stands_after_every_step_and_stays(text: Text) -> None:
    """Prompt, then each step's ids with the tag behind them."""
    reader = TagReader.of(SHEPHERD, text)
    assert text.pieces[reader.tag] == "ки".encode()
    assert reader.path((1, 2), ((3, 4), (5,))) == (1, 2, 3, 4, reader.tag, 5, reader.tag)


def test_reward_by_hand() -> None:
    """softmax over the two verdicts: 1/2 where they tie, 1/(1+e^-1) one apart, others ignored."""
    reader = TagReader(tag=3, good=0, bad=1)
    assert reader.reward(torch.tensor([2.0, 2.0, 9.0])) == 0.5
    assert reader.reward(torch.tensor([2.0, 1.0, 9.0])) == pytest.approx(0.7310585786300049)
    assert reader.reward(torch.tensor([0.0, 5000.0, 0.0])) == pytest.approx(0.0)
    assert reader.reward(torch.tensor([5000.0, 0.0, 0.0])) == 1.0


@pytest.mark.parametrize("part", ["tag", "good", "bad"])
def test_a_verdict_that_is_not_one_token_is_refused_by_name(text: Text, part: str) -> None:
    """At start, not at the first score; the message names format, part and text."""
    broken = replace(SHEPHERD, **{part: "not one token"})
    with pytest.raises(RewardMissing, match=f"'math-shepherd': {part} 'not one token'"):
        TagReader.of(broken, text)


def test_unknown_formats_are_refused_with_what_there_is() -> None:
    """The error names the field, the value and the formats."""
    with pytest.raises(ValueError, match="reward_format: 'oracle'; one of math-shepherd, none"):
        reward_format("oracle")
    assert not reward_format("none").needs_model
    assert all(name == form.name for name, form in REWARD_FORMATS.items())
