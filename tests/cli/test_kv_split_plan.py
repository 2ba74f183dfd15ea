"""``hedgerow plan``: the split in tokens and fractions, with its reasons."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cli.kv_split_plan import make_plan
from cli.main import app
from kvpolicy.roofline import SplitLoad
from models.bundled import SPRIG_FOLDER
from runtime.embedded.model.config import ModelConfig
from server.gpus import Gpu
from server.settings import SettingsError, load_settings

GPU = ["--length", "500", "--gpu", "100", "1000", "0.1"]


def run(*words: str) -> str:
    """Run the command and return what it prints."""
    invocation = CliRunner().invoke(app, ["plan", *words])
    assert invocation.exit_code == 0, invocation.output
    return invocation.stdout


def test_this_machines_plan_gives_out_all_tokens_and_says_why() -> None:
    """The shares add up to the budget: a token costs each model the keys of its layers."""
    plan = json.loads(run("--json", "--kv-tokens", "4096", "--sequences", "16"))
    shares = plan["roofline"]
    layers = [ModelConfig.from_checkpoint(SPRIG_FOLDER / name).layers for name in ("policy", "prm")]

    def layer_tokens(*tokens: int) -> int:
        return sum(layer_count * count for layer_count, count in zip(layers, tokens, strict=True))

    remaining = layer_tokens(4096, 65_536) - layer_tokens(
        shares["kv_tokens"], shares["prm_kv_tokens"]
    )
    assert 0 <= remaining < max(layers)
    assert shares["kv_tokens"] > shares["prm_kv_tokens"]
    assert plan["device"]["flops"] > 0 < plan["device"]["bandwidth"]
    assert plan["even"]["generator_bytes"] == plan["budget_bytes"] // 2
    assert any("so a larger batch would" in reason for reason in plan["reasons"])


def test_a_gpus_plan_is_two_fractions() -> None:
    """The second fraction is of what the first server leaves; the sum stays within the memory."""
    plan = json.loads(run("--json", *GPU))
    first, second = (plan["mem_fraction_static"][name] for name in ("policy", "reward_model"))
    assert 0 < first < 1
    assert 0 < second < 1
    assert first + (1 - first) * second <= 0.9
    words = run(*GPU)
    assert f"policy: --mem-fraction-static {first}" in words
    assert "Peaks: 100000 GFLOP/s, 1000 GB/s." in words


def test_with_a_draft_the_policys_server_gets_its_flags() -> None:
    """SEED drafts three tokens in a chain, or a tree of 1 + 2 + 4 + 4; a token of KV costs the
    layers of both models, so fewer tokens fit."""
    drafted = json.loads(run("--json", *GPU, "--draft", "scheduled"))
    draft = SPRIG_FOLDER / "draft"
    batch = drafted["roofline"]["generator_batch"]
    assert drafted["draft_args"] == (
        f"--speculative-algorithm STANDALONE --speculative-draft-model-path {draft} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
        f"--max-running-requests {batch}"
    )
    assert f"policy: {drafted['draft_args']}" in run(*GPU, "--draft", "scheduled")
    plain = json.loads(run("--json", *GPU))
    assert "draft_args" not in plain
    assert drafted["budget_bytes"] < plain["budget_bytes"]
    assert drafted["roofline"]["kv_tokens"] < plain["roofline"]["kv_tokens"]
    variables = {"HEDGEROW_K_CONFIG": "2,2,1", "HEDGEROW_DRAFT": "scheduled"}
    gpu = Gpu("", 100, 1000, 0.1)
    draft_args = make_plan(load_settings(variables), SplitLoad(4, 100, 10), gpu)["draft_args"]
    assert "num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 11 " in draft_args


def test_what_host_memory_would_win() -> None:
    """At 25 GB/s copying KV back is faster than computing it at 100 TFLOP/s; at a hundredth of that
    it is not, nor where the processor's memory is the model's own."""
    fast = json.loads(run("--json", *GPU, "--host-bandwidth", "25"))["offload"]
    slow = json.loads(run("--json", *GPU, "--host-bandwidth", "0.25"))["offload"]
    for name in ("policy", "reward_model"):
        assert slow[name]["copied_us"] == pytest.approx(100 * fast[name]["copied_us"])
        assert fast[name]["computed_us"] == slow[name]["computed_us"]
    config = ModelConfig.from_checkpoint(SPRIG_FOLDER / "policy")
    size = 2 * config.layers * config.kv_heads * config.head_dim * 2
    assert fast["policy"]["copied_us"] == pytest.approx(size / 25e3)
    assert fast["apart_seconds"] < slow["apart_seconds"]
    assert slow["policy"]["args"] == slow["reward_model"]["args"] == ""
    quick = run("--length", "500", "--gpu", "1", "1000", "0.1", "--host-bandwidth", "25")
    assert "policy: --enable-hierarchical-cache (without our plug-in's eviction)" in quick
    assert "comes back from host memory in" in quick
    assert "offload" not in json.loads(run("--json", *GPU))
    invocation = CliRunner().invoke(app, ["plan", *GPU, "--host-bandwidth", "0"])
    assert invocation.exit_code == 2
    assert "host bandwidth: 0.0; more than 0 GB/s is needed" in invocation.stderr


def test_host_memory_is_a_gpus() -> None:
    """Without a GPU there is no bandwidth to its host memory."""
    invocation = CliRunner().invoke(app, ["plan", "--host-bandwidth", "25"])
    assert invocation.exit_code == 2
    assert "--host-bandwidth: --gpu is needed, too" in invocation.stderr


def test_beginnings_that_are_shared_leave_room_for_more() -> None:
    """If only a tenth of each sequence is its own, more sequences fit at once."""
    small = [*GPU[:-1], "0.03"]
    plans = [json.loads(run("--json", *small, *options)) for options in ([], ["--own", "50"])]
    apart, shared = (plan["roofline"] for plan in plans)
    assert shared["generator_batch"] > apart["generator_batch"]
    assert shared["seconds"] < apart["seconds"]


def test_what_cannot_be_planned_is_one_line() -> None:
    """Without a reward model or without room, the error is one line."""
    with pytest.raises(SettingsError, match="nothing to share"):
        make_plan(load_settings({}, reward_format="none"), SplitLoad(4, 100, 10))
    invocation = CliRunner().invoke(app, ["plan", *GPU[:-1], "0.01"])
    assert invocation.exit_code == 2
    assert "one sequence needs" in invocation.stderr
