"""Settings that follow from the model's name: profile, reward format, served name, engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.bundled import SPRIG_FOLDER
from models.catalog import hub_name, names_of, public_policies, public_reward_models
from runtime.profiles import PROFILES
from runtime.reward_format import REWARD_FORMATS
from server import machine
from server.assemble import engine_options
from server.machine import CudaDevice
from server.settings import Settings, SettingsError, load_settings

TINY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def checkpoint(folder: Path, **config: Any) -> str:
    """Make a folder with a configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | config))
    return str(folder)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own GPUs."""
    monkeypatch.setattr(machine, "cuda_devices", lambda: ())


def test_the_bundled_model_brings_what_belongs_to_it() -> None:
    """It does so by its name, and where no model is named."""
    for environ in ({}, {"HEDGEROW_POLICY_MODEL": "sprig", "HEDGEROW_REWARD_MODEL": "sprig"}):
        settings = load_settings(environ)
        assert (settings.policy_model, settings.reward_model) == (
            SPRIG_FOLDER / "policy",
            SPRIG_FOLDER / "prm",
        )
        assert (settings.model, settings.profile, settings.reward_format) == (
            *("sprig", "sprig", "math-shepherd"),
        )
        assert (settings.engine, settings.draft_model) == ("embedded", SPRIG_FOLDER / "draft")


def test_of_any_other_model_nothing_is_assumed(tmp_path: Path) -> None:
    """It is served by its folder's name, as a chat model, without a reward model."""
    settings = load_settings({}, policy_model=checkpoint(tmp_path / "My model"))
    assert (settings.model, settings.profile) == ("My-model", "chat")
    assert (settings.reward_model, settings.reward_format) == (None, "none")
    assert (settings.draft_model, settings.engine) == (None, "embedded")


@pytest.mark.parametrize("row", public_policies(), ids=lambda row: row.names[0])
def test_a_public_policy_is_known_by_its_name(row: Any, tmp_path: Path) -> None:
    """The name may be the hub's, a cache folder's, a folder's, or the configuration's."""
    for name in row.names:
        owner, short = name.split("/")
        cached = tmp_path / f"models--{owner}--{short}" / "snapshots" / "abc"
        assert hub_name(cached) == name
        folders = (
            name,
            checkpoint(cached),
            checkpoint(tmp_path / "models" / short.lower()),
            checkpoint(tmp_path / "mine", _name_or_path=name),
        )
        assert {load_settings({}, policy_model=path).profile for path in folders} == {row.profile}
        assert load_settings({}, policy_model=folders[1]).model == name
        assert load_settings({}, policy_model=folders[2]).model == short.lower()


@pytest.mark.parametrize("row", public_reward_models(), ids=lambda row: row.names[0])
def test_a_public_reward_model_is_known_by_its_name_or_class(row: Any, tmp_path: Path) -> None:
    """A class with only one reading decides the format under any name."""
    kind = {"architectures": [row.architecture]}
    settings = load_settings({}, reward_model=row.names[0])
    assert settings.reward_format == row.format
    named_folder = checkpoint(tmp_path / row.names[0].split("/")[1], **kind)
    assert load_settings({}, reward_model=named_folder).reward_format == row.format
    renamed = load_settings({}, reward_model=checkpoint(tmp_path / "prm", **kind))
    assert renamed.reward_format == (row.format if row.only else "auto")


def test_the_catalog_names_what_there_is() -> None:
    """Profiles and formats exist; no name is there twice."""
    assert {row.profile for row in public_policies()} <= PROFILES.keys()
    assert {row.format for row in public_reward_models()} <= REWARD_FORMATS.keys()
    names = [name for row in (*public_policies(), *public_reward_models()) for name in row.names]
    assert len({name.lower() for name in names}) == len(names)


def test_a_folders_name_is_not_a_part_of_a_known_one(tmp_path: Path) -> None:
    """Names are compared as a whole."""
    assert names_of(tmp_path / "Qwen") == {"qwen"}
    assert load_settings({}, policy_model=checkpoint(tmp_path / "Qwen")).profile == "chat"


def test_an_unknown_reward_model_needs_its_format(tmp_path: Path) -> None:
    """The error names the model, its class and the setting; the format is not guessed."""
    prm = checkpoint(tmp_path / "prm", architectures=["LlamaForCausalLM"])
    words = r"HEDGEROW_REWARD_FORMAT = 'auto': nothing is known of .*prm \(LlamaForCausalLM\); set"
    with pytest.raises(SettingsError, match=words):
        engine_options(load_settings({}, reward_model=prm))
    settings = load_settings({}, reward_model=prm, reward_format="rlhflow")
    assert engine_options(settings).reward_format == "rlhflow"


def test_every_guess_can_be_overridden(tmp_path: Path) -> None:
    """The environment and options both override it."""
    environ = {"HEDGEROW_MODEL": "mine", "HEDGEROW_PROFILE": "qwen", "HEDGEROW_ENGINE": "embedded"}
    settings = load_settings(environ, policy_model=checkpoint(tmp_path / "m"), reward_model="sprig")
    assert (settings.model, settings.profile, settings.engine) == ("mine", "qwen", "embedded")
    assert settings.reward_model == SPRIG_FOLDER / "prm"
    auto = {f"HEDGEROW_{name.upper()}": "auto" for name in ("model", "profile", "engine")}
    assert load_settings(auto) == Settings()


def test_auto_launches_sglang_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so for all but bundled models; URLs and --launch override it."""
    python = tmp_path / "python"
    python.touch()
    fields = {"policy_model": checkpoint(tmp_path / "m"), "launch_python": str(python)}
    assert load_settings({}, policy_model=fields["policy_model"]).engine == "embedded"
    monkeypatch.setattr(machine, "cuda_devices", lambda: (CudaDevice("H100", 80 << 30),))
    settings = load_settings({}, **fields)
    assert (settings.engine, settings.engine_way) == ("sglang", "--engine sglang --launch")
    assert load_settings({}).engine == "embedded"
    assert load_settings({}, launch=True).engine_way == "--engine sglang --launch"
    urls = load_settings({}, policy_urls="http://a:1")
    assert urls.engine_way == "--engine sglang with --policy-url"


def test_what_cannot_run_here_is_refused_with_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are those of both models; a class that the embedded engine does not run is named."""
    big = checkpoint(tmp_path / "big", hidden_size=8192, num_hidden_layers=80)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**9)
    with pytest.raises(SettingsError) as error:
        load_settings({}, policy_model=big)
    assert "HEDGEROW_ENGINE = 'auto'" in str(error.value)
    assert "GB of weights in float32" in str(error.value)
    assert f"hedgerow serve {big} --policy-url http://HOST:30000" in str(error.value)
    assert load_settings({}, policy_model=big, engine="embedded").engine == "embedded"
    unsupported = checkpoint(tmp_path / "other", architectures=["Gemma3ForCausalLM"])
    with pytest.raises(SettingsError, match="Gemma3ForCausalLM; the embedded engine runs Llama"):
        load_settings({}, policy_model=unsupported)
    monkeypatch.setattr(machine, "cuda_devices", lambda: (CudaDevice("H100", 80 << 30),))
    with pytest.raises(SettingsError, match="there is a CUDA device, but no SGLang at"):
        load_settings({}, policy_model=unsupported, launch_python="nowhere")


def test_gpus_are_read_off_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only visible GPUs are listed; any failure means none."""
    monkeypatch.undo()
    smi = tmp_path / "nvidia-smi"
    lines = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA Thing, [N/A]\n"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nprintf "{lines}"\n')
    smi.chmod(0o755)
    monkeypatch.setattr(machine.shutil, "which", lambda _: str(smi))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices = machine.cuda_devices.__wrapped__()
    assert devices == (CudaDevice("NVIDIA H100 80GB HBM3", 81559 << 20),)
    assert (tmp_path / "asked").read_text().endswith("-i 1\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.cuda_devices.__wrapped__() == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert machine.cuda_devices.__wrapped__() == ()


def test_free_memory_is_the_machines_or_what_a_container_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller of the two; a value that is not available does not count."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(machine, "MEMINFO", meminfo)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory() is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       4 kB\n")
    assert machine.free_memory() == 4096
    for name, text in (("max", "5000"), ("current", "3000"), ("stat", "inactive_file 500\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine.free_memory() == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() == 4096
