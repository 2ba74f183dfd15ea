"""How launched SGLang servers share a GPU: by what their models need and by the settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.kv_split_plan import make_plan
from cli.model_check import check_models
from kvpolicy.roofline import SplitLoad
from models.bundled import SPRIG_FOLDER
from runtime.embedded.model.config import ModelConfig
from server import machine
from server.assemble import server_options
from server.gpus import GPUS, Gpu, local_gpu
from server.launch_memory import (
    DEFAULT_SHARES,
    PASSES_SHARE,
    Placed,
    Spread,
    launch_shares,
    room_on,
)
from server.machine import CudaDevice
from server.settings import Settings, SettingsError, load_settings
from tests.server.test_model_settings import checkpoint

QWEN_1B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
}
QWEN_7B = QWEN_1B | {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
}


LARGE = Gpu("a GPU", 312, 2039, 80)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    """Settings of a 1.5B policy and a 7B reward model, which has an embedding beside its head."""
    config = QWEN_7B | {"architectures": ["Qwen2ForProcessRewardModel"]}
    return {
        "policy_model": checkpoint(tmp_path / "policy", **QWEN_1B),
        "reward_model": checkpoint(tmp_path / "prm", **config),
        "engine": "sglang",
        "launch": True,
        "launch_python": sys.executable,
        "launch_device": "cuda",
    }


def shares(settings: Settings, gpu: Gpu | None = LARGE) -> tuple[float, float]:
    return launch_shares(settings, "cuda", settings.reward_model, gpu)


def test_both_models_and_their_passes_fit_one_gpu(pair: dict[str, Any]) -> None:
    """The second share is of what the first server leaves; a larger model gets more."""
    policy, reward = shares(load_settings({}, **pair))
    assert 0.1 < policy < 0.6
    assert policy + reward * (1 - policy) == pytest.approx(1 - PASSES_SHARE, abs=1e-3)
    assert reward * (1 - policy) * 80e9 > 15e9


def test_what_is_planned_is_checked_and_launched(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``hedgerow plan``, ``hedgerow check`` and a start give one GPU the same shares."""
    monkeypatch.setattr(
        machine, "cuda_devices", lambda: (CudaDevice("NVIDIA H100 PCIe", 81559 << 20),)
    )
    pair["reward_format"] = "qwen2.5-math-prm"
    settings, gpu = load_settings({}, **pair), GPUS["h100-pcie"]
    assert local_gpu() == replace(gpu, name="NVIDIA H100 PCIe")
    launched_shares = tuple(server.memory for server in server_options(settings))
    plan = make_plan(settings, SplitLoad(*settings.kv_load), gpu)
    memory = check_models(settings, gpu)["memory"]
    assert launched_shares == tuple(plan["mem_fraction_static"].values())
    assert launched_shares == tuple(memory["shares"].values())
    assert memory["kv_tokens"]["policy"] == plan["roofline"]["kv_tokens"]
    embedding = QWEN_7B["vocab_size"] * QWEN_7B["hidden_size"] * 2
    assert plan["budget_bytes"] < (1 - PASSES_SHARE) * (81559 << 20) - 14.1e9 - embedding - 3e9


def test_shares_are_as_set_or_all_of_a_gpu_of_ones_own(pair: dict[str, Any]) -> None:
    """Shares that are set are kept; a server alone on a GPU gets all but the passes' share."""
    fixed = load_settings({}, **pair, launch_memory="0.5,0.4")
    assert shares(fixed) == (0.5, 0.4)
    alone = 1 - PASSES_SHARE
    settings = load_settings({}, **pair)
    assert launch_shares(settings, "cuda", None, LARGE)[0] == alone
    apart = load_settings({}, **pair, reward_args="--base-gpu-id 1")
    assert shares(apart) == (alone, alone)
    wide = load_settings({}, **pair, policy_args="--tp=2", reward_args="--base-gpu-id=2 --pp-s 2")
    assert shares(wide) == (alone, alone)


def test_where_sizes_are_not_known_the_shares_are_fixed(pair: dict[str, Any]) -> None:
    """They are fixed on a CPU, over several machines, and for a mixture of experts."""
    settings = load_settings({}, **pair)
    assert launch_shares(settings, "cpu", settings.reward_model, None) == DEFAULT_SHARES
    wide = load_settings({}, **pair, policy_args="--nnodes 2 --tp-size 16")
    assert shares(wide) == DEFAULT_SHARES
    checkpoint(Path(pair["policy_model"]), num_local_experts=8)
    assert shares(settings) == DEFAULT_SHARES


def test_a_model_that_is_spread_takes_less_of_each_gpu(pair: dict[str, Any]) -> None:
    """Halves of both models on two GPUs divide weights and keys, so more fits; copies hold all
    weights each, and a part of the sequences."""
    settings = load_settings({}, **pair)
    halves = load_settings({}, **pair, policy_args="--tp-size 2", reward_args="--tp-size 2")
    copies = load_settings({}, **pair, policy_args="--dp-size 2", reward_args="--dp-size 2")
    whole, split, copied = (
        room_on(LARGE, variant, variant.reward_model) for variant in (settings, halves, copies)
    )
    assert whole
    assert split
    assert copied
    assert all(half > 2 * full for half, full in zip(split.kv_tokens, whole.kv_tokens, strict=True))
    assert copied.kv_tokens == pytest.approx([2 * tokens for tokens in whole.kv_tokens], rel=0.01)
    small = replace(LARGE, memory=14)
    with pytest.raises(ValueError, match="GB of weights in bfloat16"):
        room_on(small, settings, settings.reward_model)
    assert room_on(small, halves, settings.reward_model)


def test_gpus_are_taken_from_a_servers_arguments() -> None:
    """Names and abbreviations are read as SGLang's parser does; bad numbers are left to it."""
    assert Spread.of("--tp 4 --pipeline-parallel-size=2 --base-gpu 1") == Spread(4, 2, 1, 1)
    assert Spread.of("--dp-size 2 --tp-size 4 --enable-dp-attention") == Spread(4)
    assert Spread.of("--tp-size many") is None
    assert Spread.of("--tp-size 0") is None
    assert Spread.of("--d 2") is None
    assert Spread(2).meets(Spread(1, first=1))
    assert not Spread(2).meets(Spread(1, first=2))
    assert Spread(1, 1, 2).meets(Spread(first=1))


def test_more_parts_than_heads_of_keys_hold_one_each() -> None:
    """SGLang repeats heads then, so each part holds one."""
    config = ModelConfig.from_checkpoint(SPRIG_FOLDER / "policy")
    whole, spread = Placed.of(config), Placed.of(config, Spread(64))
    assert spread.costs.kv_bytes == whole.costs.kv_bytes / config.kv_heads
    assert spread.weights == whole.weights / 64


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce GTX 1070", "a100"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(
    driver_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are its row's, memory the driver's; an unknown GPU gets an A100's peaks."""
    monkeypatch.setattr(machine, "cuda_devices", lambda: (CudaDevice(driver_name, 8 * 10**9),))
    gpu = local_gpu()
    assert gpu == Gpu(driver_name, GPUS[name].teraflops, GPUS[name].bandwidth, 8.0)


def test_what_does_not_fit_is_said_before_anything_starts(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the sizes and remedies; ``check`` is about the GPU that it is asked for."""
    monkeypatch.setattr(machine, "cuda_devices", lambda: (CudaDevice("small", 16 * 10**9),))
    settings = load_settings({}, **pair, reward_format="qwen2.5-math-prm")
    with pytest.raises(SettingsError) as error:
        server_options(settings)
    for part in ("18.8 GB of weights in bfloat16", "14.1 of small's 16 GB", "--base-gpu-id 1"):
        assert part in str(error.value)
    assert sum("18.8 GB" in reason for reason in check_models(settings)["refused"]) == 1
    assert "GB of weights" not in str(check_models(settings, GPUS["h100"])["refused"])
