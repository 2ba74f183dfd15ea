"""The mean of two models."""

import torch

from models.train.batches import load_tokenizer
from models.train.mean import mean
from models.train.network import new_model


def test_the_mean_stands_between_two_models() -> None:
    """Each weight lies a quarter of the way from the first model's to the second's."""
    tokenizer = load_tokenizer()
    target = new_model("draft", tokenizer, 2)
    moved = mean(new_model("draft", tokenizer, 1), target, 0.25)
    start = new_model("draft", tokenizer, 1)
    parts = zip(moved.parameters(), start.parameters(), target.parameters(), strict=True)
    for now, before, there in parts:
        assert torch.allclose(now, 0.75 * before + 0.25 * there, atol=1e-6)
