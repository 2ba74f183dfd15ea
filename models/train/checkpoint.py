"""Saving, resuming, exporting and publishing: a run can be stopped and continued at any step.

What is trained lies in the cache until `python -m models.train.checkpoint policy prm draft`
moves it over the bundled models: nobody who serves or tests them sees a half-trained one.
"""

import argparse
import copy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from models.bundled import SPRIG_FOLDER

CACHE = Path(__file__).parents[2] / ".cache" / "train"
FRESH = CACHE / "sprig"
"""Models trained and not yet published, a folder each."""


class OtherRun(SystemExit):
    """A checkpoint is of a run with other options; the message names the file and the option."""


def save(name: str, options: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Write a checkpoint of a run; a crash midway leaves the previous one."""
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = CACHE / f"{name}.partial"
    torch.save(state | {"options": dict(options)}, partial)
    partial.replace(CACHE / f"{name}.pt")


def load(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last checkpoint of a run, None if there is none. Raises OtherRun."""
    path = CACHE / f"{name}.pt"
    if not path.exists():
        return None
    state = torch.load(path, weights_only=True)
    saved_options = state.get("options", {})
    for option in sorted({*options, *saved_options}):
        current, saved = options.get(option), saved_options.get(option)
        if current != saved:
            raise OtherRun(
                f"{path} is of a run with --{option} {saved}, this one has {current}: "
                "move it away to begin anew"
            )
    return state


class Average:
    """An exponential moving average of a model's weights: what is exported."""

    def __init__(self, model: LlamaForCausalLM, keep: float = 0.995) -> None:
        self.keep = keep
        self.model: LlamaForCausalLM = copy.deepcopy(model)
        self.model.requires_grad_(False)
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        """Move towards the model's weights (faster during the first steps)."""
        self.steps += 1
        weight = 1 - min(self.keep, self.steps / (self.steps + 10))
        for averaged, current in zip(self.model.parameters(), model.parameters(), strict=True):
            averaged.lerp_(current.detach(), weight)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Write a model into the cache for plain transformers, in bf16."""
    model_copy = copy.deepcopy(model).bfloat16()
    model_copy.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model_copy.save_pretrained(FRESH / folder)


def load_model(folder: str) -> LlamaForCausalLM:
    """A model in float32: the one trained last if it is not published yet, else the bundled one."""
    fresh = FRESH / folder
    path = fresh if (fresh / "model.safetensors").exists() else SPRIG_FOLDER / folder
    print(f"model: {path}", file=sys.stderr)
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)


def publish(folder: str) -> None:
    """Move a trained model over the bundled one; the tokenizer's files stay."""
    for path in (FRESH / folder).iterdir():
        shutil.move(path, SPRIG_FOLDER / folder / path.name)


def main() -> None:
    """Publish models."""
    parser = argparse.ArgumentParser(description="Move trained models over the bundled ones.")
    parser.add_argument("folders", nargs="+", choices=("policy", "prm", "draft"))
    for folder in parser.parse_args().folders:
        publish(folder)


if __name__ == "__main__":
    main()
