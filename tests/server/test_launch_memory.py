"""How launched SGLang servers share a GPU: by what their models take and what is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import launch_memory, machine
from server.launch_memory import GIVEN, PASSES_SHARE, launch_shares
from server.machine import CudaDevice
from server.settings import SettingsError, load_settings
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


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a 1.5B policy and a 7B reward model, on a GPU of 80 GiB."""
    gpu(monkeypatch, 80 << 30)
    config = QWEN_7B | {"architectures": ["Qwen2ForProcessRewardModel"]}
    return {
        "policy_model": checkpoint(tmp_path / "policy", **QWEN_1B),
        "reward_model": checkpoint(tmp_path / "prm", **config),
        "engine": "sglang",
    }


def gpu(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """A machine with such a GPU."""
    monkeypatch.setattr(launch_memory, "cuda_devices", lambda: (CudaDevice("a GPU", memory),))
    monkeypatch.setattr(machine, "cuda_devices", lambda: (CudaDevice("a GPU", memory),))


def test_both_models_and_their_passes_fit_one_gpu(pair: dict[str, str]) -> None:
    """The second share is of what the first server leaves; a larger model gets more."""
    settings = load_settings({}, **pair)
    policy, reward = launch_shares(settings, "cuda", settings.reward_model)
    assert 0.1 < policy < 0.6
    assert policy + reward * (1 - policy) == pytest.approx(1 - PASSES_SHARE, abs=1e-3)
    assert reward * (1 - policy) * (80 << 30) > 15e9


def test_shares_are_as_set_or_all_of_a_gpu_of_ones_own(pair: dict[str, str]) -> None:
    """One server, or a second GPU: what passes leave."""
    given = load_settings({}, **pair, launch_memory="0.5,0.4")
    assert launch_shares(given, "cuda", given.reward_model) == (0.5, 0.4)
    alone = 1 - PASSES_SHARE
    settings = load_settings({}, **pair)
    assert launch_shares(settings, "cuda", None)[0] == alone
    apart = load_settings({}, **pair, reward_args="--base-gpu-id 1")
    assert launch_shares(apart, "cuda", apart.reward_model) == (alone, alone)


def test_where_sizes_are_not_known_the_shares_are_fixed(pair: dict[str, str]) -> None:
    """On a CPU, over several GPUs, for a model of experts."""
    settings = load_settings({}, **pair)
    assert launch_shares(settings, "cpu", settings.reward_model) == GIVEN
    wide = load_settings({}, **pair, policy_args="--tp-size=2")
    assert launch_shares(wide, "cuda", wide.reward_model) == GIVEN
    checkpoint(Path(pair["policy_model"]), num_local_experts=8)
    assert launch_shares(settings, "cuda", settings.reward_model) == GIVEN


def test_what_does_not_fit_is_said_before_anything_starts(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes, and what may be done."""
    settings = load_settings({}, **pair)
    gpu(monkeypatch, 16 << 30)
    with pytest.raises(SettingsError) as refused:
        launch_shares(settings, "cuda", settings.reward_model)
    assert "GB of weights in bfloat16" in str(refused.value)
    assert "17 GB" in str(refused.value)
    assert "--base-gpu-id 1" in str(refused.value)
