"""The mean of two models' weights: `python -m models.train.mean FOLDER OTHER --share 0.75`.

If one started as the other it can know what both know (Wortsman et al. 2022, arXiv 2203.05482).
It is written into the cache as the reward model trained last.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.train import checkpoint
from models.train.batches import load_tokenizer


def mean(model: LlamaForCausalLM, other: LlamaForCausalLM, share: float) -> LlamaForCausalLM:
    """Move the weights of `model` by `share` of the way to those of `other`, in place."""
    with torch.no_grad():
        for weight, other_weight in zip(model.parameters(), other.parameters(), strict=True):
            weight.lerp_(other_weight, share)
    return model


def main() -> None:
    """Write the mean of two folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="the other one's weight")
    options = parser.parse_args()
    model, other = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in options.folders
    )
    checkpoint.export(mean(model, other, options.share), load_tokenizer(), "prm")


if __name__ == "__main__":
    main()
