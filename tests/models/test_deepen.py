"""Deeper target models: higher cost, the same logits bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.deepen import deepen
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward

DRAFT = Path("models/sprig/draft")


def test_a_deeper_model_says_the_same_bits(tmp_path: Path) -> None:
    """With two more layers that add nothing every logit of every position is the same."""
    deepen(DRAFT, tmp_path / "deep", 4)
    outputs = []
    for path in (DRAFT, tmp_path / "deep"):
        forward = Forward(path, threads=1)
        tokens = np.arange(40) * 7 % forward.config.vocab
        outputs.append(forward.run([Span(tokens, 0, np.arange(40), 0)], forward.new_store(40)))
        outputs.append(forward.config.layers)
    assert torch.equal(outputs[0], outputs[2])
    assert (outputs[1], outputs[3]) == (2, 4)
    assert (tmp_path / "deep" / "tokenizer.json").is_file()


def test_layers_are_not_taken_away(tmp_path: Path) -> None:
    """Fewer layers than the model has are refused."""
    with pytest.raises(ValueError, match="layers: 1; models/sprig/draft has 2"):
        deepen(DRAFT, tmp_path / "flat", 1)
