"""``hedgerow check``: says without a start what would serve a model, or why it would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from models.bundled import SPRIG_FOLDER
from server import machine
from server.gpus import GPUS, gpu_of
from tests.runtime.test_reward_models import CASES
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

POLICY, PRM = "Qwen/Qwen2.5-Math-1.5B-Instruct", "Qwen/Qwen2.5-Math-PRM-7B"
QWEN_7B = {
    "architectures": ["Qwen2ForProcessRewardModel"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
}
QWEN_1B = QWEN_7B | {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be a machine with 8 GB of free memory and no GPU."""
    monkeypatch.setattr(machine, "free_memory", lambda: 8 * 10**9)
    monkeypatch.setattr(machine, "cuda_devices", tuple)


def model_folder(folder: Path, config: dict[str, Any], *specials: str) -> Path:
    """Write a model's configuration and tokenizer, but no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(specials).save_pretrained(folder)
    return folder


def check(*args: object) -> tuple[int, dict[str, Any]]:
    invocation = CliRunner().invoke(app, ["check", *map(str, args), "--json"])
    return invocation.exit_code, json.loads(invocation.stdout)


def test_the_bundled_model_runs_anywhere() -> None:
    """The bundled model, by its name, runs on the embedded engine."""
    code, report = check("sprig")
    assert (code, report["refused"], report["engine"]) == (0, [], "--engine embedded")
    assert report["engines"] == {"embedded": [], "sglang": []}
    assert (report["reward_format"], report["command"]) == ("math-shepherd", "hedgerow serve sprig")
    assert report["policy"]["kv_bytes"] == 2 * 6 * 128 * 4


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A policy and a reward model as the hub's tools have them before the weights."""
    specials = ("<|im_start|>", "<|im_end|>", "<extra_0>")
    policy = model_folder(tmp_path / hub_folder(POLICY), QWEN_1B)
    return policy, model_folder(tmp_path / hub_folder(PRM), QWEN_7B, *specials)


def hub_folder(name: str) -> str:
    return f"models--{name.replace('/', '--')}/snapshots/1"


def test_a_pair_on_a_gpu(pair: tuple[Path, Path]) -> None:
    """15.2 and 3.1 GB in bfloat16 fit on an H100; the report has shares and flags."""
    policy, prm = pair
    code, report = check(policy, "--reward-model", prm, "--gpu", "h100")
    assert (code, report["refused"], report["engine"]) == (0, [], "--engine sglang --launch")
    assert report["reward_format"] == "qwen2.5-math-prm"
    assert report["reward_model"]["weight_bytes"] == pytest.approx(15.2e9, rel=0.01)
    assert report["policy"]["weight_bytes"] == pytest.approx(3.1e9, rel=0.01)
    assert report["policy"]["kv_bytes"] == 2 * 28 * 2 * 128 * 2
    first, second = report["memory"]["shares"].values()
    assert f"--launch --launch-memory {first},{second}" in report["command"]
    assert all(tokens > 10_000 for tokens in report["memory"]["kv_tokens"].values())
    policy_command, reward_command = report["server_commands"]
    assert f"--model-path {POLICY} " in policy_command
    assert report["command"].startswith(f"hedgerow serve {POLICY} --reward-model {PRM} ")
    assert (report["policy"]["known"], report["policy"]["weights_here"]) == (True, False)
    assert "--radix-cache-backend hedgerow" in policy_command
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE=hedgerow_sglang.reward_models" in reward_command
    assert " --is-embedding" in reward_command


def test_what_does_not_fit(pair: tuple[Path, Path]) -> None:
    """Neither a small GPU nor this machine has room; each refusal says what to do instead."""
    policy, prm = pair
    code, report = check(policy, "--reward-model", prm, "--gpu", "121,300,16")
    (refusal,) = report["refused"]
    assert (code, "command" in report, report["command"]) == (2, True, "")
    assert "18.3 GB of weights in bfloat16, 14.1 of 121,300,16's 16 GB" in refusal
    assert "--tp-size 2" in refusal
    code, report = check(policy, "--reward-model", prm)
    assert code == 2
    assert "GB of memory is free" in report["refused"][0]
    assert "hedgerow serve" in report["refused"][0]


def test_a_format_that_the_head_does_not_give(tmp_path: Path) -> None:
    """A format that does not fit the reward head or the tokenizer is refused before a start."""
    policy, one_output = make_checkpoint(tmp_path / "text"), CASES["skywork"].make(tmp_path / "one")
    assert check(policy, "--reward-model", one_output)[0] == 0
    for form, message in (
        ("rlhflow", "Qwen2ForPrmModel has a reward head and writes no verdicts"),
        ("qwen2.5-math-prm", "tag '<extra_0>' is not one token"),
    ):
        code, report = check(policy, "--reward-model", one_output, "--reward-format", form)
        assert code == 2
        assert all(message in "".join(reasons) for reasons in report["engines"].values())
    two_outputs = CASES["qwen2.5-math-prm"].make(tmp_path / "two")
    code, report = check(
        *(policy, "--reward-model", two_outputs, "--reward-format", "skywork", "--gpu", "l4")
    )
    assert (code, len(report["refused"])) == (2, 1)
    assert "has 2 outputs, reward format 'skywork' reads one" in report["refused"][0]


def test_a_class_that_only_sglang_may_have(tmp_path: Path) -> None:
    """Refused here with the classes that the embedded engine runs; SGLang may run it on a GPU."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**QWEN_1B, "model_type": "gemma3_text", "sliding_window": 512},
    }
    policy = model_folder(tmp_path / hub_folder("google/gemma"), config)
    code, report = check(policy)
    assert code == 2
    assert "the embedded engine runs LlamaForCausalLM, " in report["engines"]["embedded"][0]
    code, report = check(policy, "--gpu", "h100")
    assert (code, report["engines"]["sglang"]) == (0, [])
    assert any("Gemma3ForConditionalGeneration: whether SGLang has" in n for n in report["notes"])
    assert report["memory"]["shares"] == {"policy": 0.88}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.safetensors": None}, "holds no weights"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_not_whole(change: dict[str, None], message: str, tmp_path: Path) -> None:
    """Missing weights or tokenizer are named, for any engine."""
    policy = make_checkpoint(tmp_path / "text")
    for name in change:
        (policy / name).unlink()
    code, report = check(policy)
    assert code == 2
    assert message in report["refused"][0]


def test_refused_options_are_refused_here_too(tmp_path: Path) -> None:
    """Options that a launched server may not get are refused by the check, too."""
    args = ("--engine", "sglang", "--launch", "--policy-args", "--hos 0.0.0.0")
    code, report = check(make_checkpoint(tmp_path / "text"), *args)
    assert code == 2
    assert "--hos (short for --host): not allowed" in report["refused"][0]


def test_as_a_table(tmp_path: Path) -> None:
    """Without ``--json`` a table is printed; one line if there is nothing to check."""
    invocation = CliRunner().invoke(app, ["check", "sprig", "--gpu", "h100"])
    assert invocation.exit_code == 0
    for part in ("reward format", "h100, 86 GB", "serve: hedgerow serve sprig --engine sglang"):
        assert part in invocation.stdout
    assert f"--model-path {SPRIG_FOLDER / 'policy'} " in invocation.stdout
    invocation = CliRunner().invoke(app, ["check", str(tmp_path / "nowhere")])
    assert (invocation.exit_code, "there is no such folder" in invocation.stderr) == (2, True)
    invocation = CliRunner().invoke(app, ["check", "sprig", "--gpu", "abacus"])
    assert (invocation.exit_code, "--gpu 'abacus': one of b200, " in invocation.stderr) == (2, True)


def test_gpus_by_name_and_by_numbers() -> None:
    """A GPU is a name from the table of data sheets, or a user's own numbers."""
    assert gpu_of("H100") is GPUS["h100"]
    assert (gpu_of("100, 900,24").bandwidth, gpu_of("100,900,24").memory) == (900, 24)
    for wrong in ("1,2", "0,1,1", "a,b,c"):
        with pytest.raises(ValueError, match=wrong):
            gpu_of(wrong)
