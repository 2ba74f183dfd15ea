"""Train the policy: `python -m models.train.policy --phase learn`, then `--phase refine`.

With `--world 2 --rank 0` and `--world 2 --rank 1` two processes share the work. `refine` starts
from the policy as it is and wants samples of it to judge (`models.train.prm_data`).
"""

import copy
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train import checkpoint
from models.train.batches import IGNORED, MicroBatch, Row, draw_rows, load_tokenizer
from models.train.corpus import COPYING, JUDGING, MIXTURE, READING, REFINED, SLIPPING
from models.train.network import logits_at, new_model
from models.train.prm_data import load_verdicts
from models.train.run import TrainingRun, arguments

SEED = 2
EXAMPLES_A_STEP = 40
"""In all processes together."""
SHARPNESS = 1.1
"""The exported model's distribution at temperature 1 is the learnt one's at 1/1.1."""


class PolicyPhase(NamedTuple):
    """A run on one mixture: its minutes, the model to start from, and its relative rate."""

    minutes: float
    mixture: dict[str, float]
    start: str | None
    rate_scale: float


PHASES = {
    "learn": PolicyPhase(75, MIXTURE, None, 1.0),
    "refine": PolicyPhase(36, REFINED, "policy", 0.6),
    "judge": PolicyPhase(18, JUDGING, "policy", 0.5),
    "copy": PolicyPhase(12, COPYING, "policy", 1.0),
    "read": PolicyPhase(40, READING, "policy", 0.7),
    "slip": PolicyPhase(12, SLIPPING, "policy", 0.5),
}


def token_losses(model: LlamaForCausalLM, batch: MicroBatch) -> Tensor:
    """The loss at every learnt position, row by row."""
    mask = batch.labels != IGNORED
    logits = logits_at(model, batch.ids, mask)
    return F.cross_entropy(logits, batch.labels[mask], reduction="none")


def scaled(model: LlamaForCausalLM, by: float) -> LlamaForCausalLM:
    """A copy whose logits are scaled, by way of the last norm, which the tied output reads."""
    model_copy = copy.deepcopy(model)
    with torch.no_grad():
        model_copy.model.norm.weight.mul_(by)
    return model_copy


def main() -> None:
    """Train or resume a phase."""
    parser = arguments(__doc__, 0)
    parser.add_argument("--phase", choices=PHASES, required=True)
    options = parser.parse_args()
    phase, tokenizer = PHASES[options.phase], load_tokenizer()
    options.minutes = options.minutes or phase.minutes
    verdicts = load_verdicts(tokenizer) if "verdict" in phase.mixture else None
    if phase.start is None:
        model = new_model("policy", tokenizer, SEED)
    else:
        model = scaled(checkpoint.load_model(phase.start), 1 / SHARPNESS)

    def draw(rng: random.Random, _: int) -> list[Row]:
        count = EXAMPLES_A_STEP // options.world
        return draw_rows(tokenizer, rng, phase.mixture, count, verdicts)

    def export(average: LlamaForCausalLM) -> None:
        checkpoint.export(scaled(average, SHARPNESS), tokenizer, "policy")

    name = f"policy.{options.phase}"
    losses = lambda batch: token_losses(model, batch)  # noqa: E731
    TrainingRun(name, model, draw, losses, export, options, phase.rate_scale).train()


if __name__ == "__main__":
    main()
