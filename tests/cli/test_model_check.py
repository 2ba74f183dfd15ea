"""``hedgerow check``: what would serve a model, what would be refused and why, without a start."""

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
    """Without a GPU, with 8 GB of memory, and no settings of whoever runs the tests."""
    monkeypatch.setattr(machine, "free_memory", lambda: 8 * 10**9)
    monkeypatch.setattr(machine, "cuda_devices", tuple)


def described(folder: Path, config: dict[str, Any], *specials: str) -> Path:
    """A model's small files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(specials).save_pretrained(folder)
    return folder


def checked(*args: object) -> tuple[int, dict[str, Any]]:
    ran = CliRunner().invoke(app, ["check", *map(str, args), "--json"])
    return ran.exit_code, json.loads(ran.stdout)


def test_the_bundled_model_runs_anywhere() -> None:
    """On the embedded engine, by its name."""
    code, found = checked("sprig")
    assert (code, found["refused"], found["engine"]) == (0, [], "--engine embedded")
    assert found["engines"] == {"embedded": [], "sglang": []}
    assert (found["reward_format"], found["command"]) == ("math-shepherd", "hedgerow serve sprig")
    assert found["policy"]["kv_bytes"] == 2 * 6 * 128 * 4


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """What the hub's tools download of two models before their weights."""
    specials = ("<|im_start|>", "<|im_end|>", "<extra_0>")
    policy = described(tmp_path / hub_folder(POLICY), QWEN_1B)
    return policy, described(tmp_path / hub_folder(PRM), QWEN_7B, *specials)


def hub_folder(name: str) -> str:
    return f"models--{name.replace('/', '--')}/snapshots/1"


def test_a_pair_on_a_gpu(pair: tuple[Path, Path]) -> None:
    """15.2 and 3.1 GB in bfloat16: on an H100 there is room, shares and flags are said."""
    policy, prm = pair
    code, found = checked(policy, "--reward-model", prm, "--gpu", "h100")
    assert (code, found["refused"], found["engine"]) == (0, [], "--engine sglang --launch")
    assert found["reward_format"] == "qwen2.5-math-prm"
    assert found["reward_model"]["weight_bytes"] == pytest.approx(15.2e9, rel=0.01)
    assert found["policy"]["weight_bytes"] == pytest.approx(3.1e9, rel=0.01)
    assert found["policy"]["kv_bytes"] == 2 * 28 * 2 * 128 * 2
    first, second = found["memory"]["shares"].values()
    assert f"--launch --launch-memory {first},{second}" in found["command"]
    assert all(tokens > 10_000 for tokens in found["memory"]["kv_tokens"].values())
    ours, theirs = found["server_commands"]
    assert f"--model-path {POLICY} " in ours
    assert found["command"].startswith(f"hedgerow serve {POLICY} --reward-model {PRM} ")
    assert (found["policy"]["known"], found["policy"]["weights_here"]) == (True, False)
    assert "--radix-cache-backend hedgerow" in ours
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE=hedgerow_sglang.reward_models" in theirs
    assert " --is-embedding" in theirs


def test_what_does_not_fit(pair: tuple[Path, Path]) -> None:
    """Neither a small GPU nor this machine; each with the way out."""
    policy, prm = pair
    code, found = checked(policy, "--reward-model", prm, "--gpu", "121,300,16")
    (said,) = found["refused"]
    assert (code, "command" in found, found["command"]) == (2, True, "")
    assert "18.3 GB of weights in bfloat16, 14.1 of 121,300,16's 16 GB" in said
    assert "--tp-size 2" in said
    code, found = checked(policy, "--reward-model", prm)
    assert code == 2
    assert "GB of memory is free" in found["refused"][0]
    assert "hedgerow serve" in found["refused"][0]


def test_a_format_that_the_head_does_not_give(tmp_path: Path) -> None:
    """Verdicts of a head, two outputs of one, a tag that is no token: before anything starts."""
    policy, one = make_checkpoint(tmp_path / "text"), CASES["skywork"].make(tmp_path / "one")
    assert checked(policy, "--reward-model", one)[0] == 0
    for form, said in (
        ("rlhflow", "Qwen2ForPrmModel has a reward head and writes no verdicts"),
        ("qwen2.5-math-prm", "tag '<extra_0>' is not one token"),
    ):
        code, found = checked(policy, "--reward-model", one, "--reward-format", form)
        assert code == 2
        assert all(said in "".join(why) for why in found["engines"].values())
    two = CASES["qwen2.5-math-prm"].make(tmp_path / "two")
    code, found = checked(
        *(policy, "--reward-model", two, "--reward-format", "skywork", "--gpu", "l4")
    )
    assert (code, len(found["refused"])) == (2, 1)
    assert "has 2 outputs, reward format 'skywork' reads one" in found["refused"][0]


def test_a_class_that_only_sglang_may_have(tmp_path: Path) -> None:
    """Refused here with the list of what the embedded engine runs; on a GPU SGLang may run it."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**QWEN_1B, "model_type": "gemma3_text", "sliding_window": 512},
    }
    policy = described(tmp_path / hub_folder("google/gemma"), config)
    code, found = checked(policy)
    assert code == 2
    assert "the embedded engine runs LlamaForCausalLM, " in found["engines"]["embedded"][0]
    code, found = checked(policy, "--gpu", "h100")
    assert (code, found["engines"]["sglang"]) == (0, [])
    assert any("Gemma3ForConditionalGeneration: whether SGLang has" in n for n in found["notes"])
    assert found["memory"]["shares"] == {"policy": 0.88}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.safetensors": None}, "holds no weights"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_not_whole(change: dict[str, None], said: str, tmp_path: Path) -> None:
    """Named, whatever engine."""
    policy = make_checkpoint(tmp_path / "text")
    for name in change:
        (policy / name).unlink()
    code, found = checked(policy)
    assert code == 2
    assert said in found["refused"][0]


def test_refused_options_are_refused_here_too(tmp_path: Path) -> None:
    """Those that a launched server would be."""
    args = ("--engine", "sglang", "--launch", "--policy-args", "--hos 0.0.0.0")
    code, found = checked(make_checkpoint(tmp_path / "text"), *args)
    assert code == 2
    assert "--hos (short for --host): not allowed" in found["refused"][0]


def test_as_a_table(tmp_path: Path) -> None:
    """For people; and one line where there is nothing to check."""
    ran = CliRunner().invoke(app, ["check", "sprig", "--gpu", "h100"])
    assert ran.exit_code == 0
    for part in ("reward format", "h100, 86 GB", "serve: hedgerow serve sprig --engine sglang"):
        assert part in ran.stdout
    assert f"--model-path {SPRIG_FOLDER / 'policy'} " in ran.stdout
    ran = CliRunner().invoke(app, ["check", str(tmp_path / "nowhere")])
    assert (ran.exit_code, "there is no such folder" in ran.stderr) == (2, True)
    ran = CliRunner().invoke(app, ["check", "sprig", "--gpu", "abacus"])
    assert (ran.exit_code, "--gpu 'abacus': one of b200, " in ran.stderr) == (2, True)


def test_gpus_by_name_and_by_numbers() -> None:
    """A data sheet's numbers, or one's own."""
    assert gpu_of("H100") is GPUS["h100"]
    assert (gpu_of("100, 900,24").bandwidth, gpu_of("100,900,24").memory) == (900, 24)
    for wrong in ("1,2", "0,1,1", "a,b,c"):
        with pytest.raises(ValueError, match=wrong):
            gpu_of(wrong)
