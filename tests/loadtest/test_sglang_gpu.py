"""`loadtest.sglang_gpu`: its random models, its servers' options and its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.sglang_gpu import DEPTH, STEP_TOKENS, _parser, _servers, chosen, models_of
from models.bundled import SPRIG_FOLDER
from runtime.embedded.model.config import ModelConfig
from runtime.text import Text


def test_random_models_read_the_bundled_tokenizers_ids(tmp_path: Path) -> None:
    """They have the requested shape and different weights; steps have a fixed length, since their
    random text has no delimiter."""
    models = models_of("tiny", tmp_path)
    policy, prm = (ModelConfig.from_checkpoint(path) for path in (models.policy, models.prm))
    assert policy == prm
    assert (policy.hidden, policy.layers, policy.heads, policy.ffn) == (64, 2, 4, 96)
    ours, theirs = Text(models.policy), Text(SPRIG_FOLDER / "policy")
    assert ours.pieces == theirs.pieces
    weights = [(path / "model.safetensors").read_bytes() for path in (models.policy, models.prm)]
    assert weights[0] != weights[1]
    assert models.fields == {
        "step_tokens": STEP_TOKENS,
        "max_step_tokens": STEP_TOKENS,
        "max_depth": DEPTH,
    }
    assert models_of("sprig", tmp_path).fields == {}


@pytest.mark.parametrize("way", ["plain", "speculate", "draft"])
def test_each_ways_flags_go_to_the_policy_alone(way: str, tmp_path: Path) -> None:
    """Every way runs our eviction plug-in; with a draft model SGLang samples by itself."""
    options = _parser().parse_args(
        ["--shape", "sprig", "--device", "cpu", "--python", sys.executable, "--width", "16"]
    )
    policy, prm = (
        " ".join(server.options.command(1))
        for server in _servers(models_of("sprig", tmp_path), options, way)
    )
    assert "--radix-cache-backend hedgerow" in policy
    draft = way == "draft"
    assert ("--sampling-backend pytorch" in policy) is not draft
    assert ("--enable-priority-scheduling" in policy) is (way == "speculate")
    assert ("dfs-weight" in policy) is (way != "speculate")
    flags = "--speculative-algorithm STANDALONE --speculative-draft-model-path"
    assert (f"{flags} {SPRIG_FOLDER / 'draft'}" in policy) is draft
    assert ("--max-running-requests 16" in policy) is draft
    assert "speculative" not in prm
    assert "priority" not in prm


def test_all_of_it_and_what_runs_on_a_cpu() -> None:
    """``--all`` turns on every part; ``--dry-run`` all but the draft, which needs a GPU."""
    everything = chosen(_parser().parse_args(["--all"]))
    assert (everything.speculate, everything.draft, everything.load) == (True, True, True)
    assert (everything.device, everything.shape) == ("cuda", "qwen2.5-1.5b")
    dry = chosen(_parser().parse_args(["--all", "--dry-run"]))
    assert (dry.speculate, dry.draft, dry.load) == (True, False, True)
    assert (dry.device, dry.shape, dry.limit) == ("cpu", "tiny", 2)
    plain = chosen(_parser().parse_args([]))
    assert (plain.speculate, plain.draft, plain.load) == (False, False, False)
