"""Settings become the engine's options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy.value import UNFITTED
from models.bundled import SPRIG_FOLDER
from runtime.accounting import no_flops
from runtime.embedders.endpoint import EndpointOptions
from server.assemble import (
    engine_options,
    model_flops,
    openai_options,
    running,
    server_options,
    sglang_options,
)
from server.settings import Settings, SettingsError, load_settings

ENDPOINT = {
    "HEDGEROW_EMBEDDER": "endpoint",
    "HEDGEROW_EMBEDDINGS_URL": "http://vectors.test/v1/embeddings",
    "HEDGEROW_EMBEDDINGS_MODEL": "minilm",
    "HEDGEROW_EMBEDDINGS_KEY": "secret",
}


@pytest.mark.parametrize(
    ("embedder", "missing"),
    [("encoder", "HEDGEROW_ENCODER"), ("endpoint", "HEDGEROW_EMBEDDINGS_URL")],
)
async def test_an_embedder_without_what_it_needs_is_refused(embedder: str, missing: str) -> None:
    """The error names the missing setting, before any process is started."""
    settings = load_settings({"HEDGEROW_EMBEDDER": embedder})
    with pytest.raises(SettingsError, match=f"{missing} is not set"):
        async with running(settings):
            pass


SERVERS = {"HEDGEROW_ENGINE": "sglang", "HEDGEROW_LAUNCH_PYTHON": sys.executable}
OPENAI = {"HEDGEROW_ENGINE": "openai", "HEDGEROW_POLICY_URLS": "http://x"}


@pytest.mark.parametrize(
    ("options_of", "environ", "rule"),
    [
        (server_options, SERVERS | {"HEDGEROW_KV_POLICY": "full"}, "servers have lru or arborkv"),
        (server_options, SERVERS | {"HEDGEROW_EMBEDDER": "hidden"}, "lexical, encoder or endpoint"),
        (sglang_options, SERVERS | {"HEDGEROW_EMBEDDER": "hidden"}, "lexical, encoder or endpoint"),
        (openai_options, OPENAI | {"HEDGEROW_EMBEDDER": "hidden"}, "lexical, encoder or endpoint"),
    ],
)
def test_what_servers_lack_is_refused(
    options_of: Callable[[Settings], object], environ: dict[str, str], rule: str
) -> None:
    """The error names the setting, its value and what servers have instead."""
    name, value = list(environ.items())[-1]
    with pytest.raises(SettingsError, match=f"{name} = '{value}': .*{rule}"):
        options_of(load_settings(environ))


def test_the_embedders_settings_reach_the_engine() -> None:
    """The endpoint with its key, which no repr shows; a layer; an encoder's folder."""
    settings = load_settings(ENDPOINT)
    expected = EndpointOptions("http://vectors.test/v1/embeddings", "minilm", "secret")
    assert engine_options(settings).endpoint == expected
    assert "secret" not in repr(settings)
    assert engine_options(load_settings({})).endpoint is None
    hidden = {"HEDGEROW_EMBEDDER": "hidden", "HEDGEROW_EMBEDDER_LAYER": "2"}
    assert engine_options(load_settings(hidden)).embedder_layer == 2
    with pytest.raises(ValueError, match="embedder_layer: 2; only the embedder 'hidden' reads"):
        engine_options(load_settings({"HEDGEROW_EMBEDDER_LAYER": "2"}))
    folder = str(SPRIG_FOLDER / "policy")
    options = engine_options(
        load_settings({"HEDGEROW_EMBEDDER": "encoder", "HEDGEROW_ENCODER": folder})
    )
    assert (options.embedder, options.encoder) == ("encoder", folder)


def test_a_theta_reaches_the_engine_or_is_refused_before_the_start(tmp_path: Path) -> None:
    """A theta of another schema is refused; ``config check`` makes the same options."""
    theta = "tests/kvpolicy/all_signals.json"
    assert (
        engine_options(load_settings({"HEDGEROW_KV_THETA": theta})).value_params().theta == UNFITTED
    )
    wrong = tmp_path / "theta.json"
    wrong.write_text('{"schema": 2}')
    with pytest.raises(ValueError, match=r"kv_theta: .*theta\.json: schema: 2; 1 is needed"):
        engine_options(load_settings({"HEDGEROW_KV_THETA": str(wrong)}))


def test_embedding_costs_the_layers_that_are_read() -> None:
    """A layer's share of a forward pass, without the head; lexical embedding costs no pass."""
    hidden = {"HEDGEROW_EMBEDDER": "hidden"}
    policy, _, middle = model_flops(load_settings(hidden))
    _, _, first = model_flops(load_settings(hidden | {"HEDGEROW_EMBEDDER_LAYER": "1"}))
    assert 0 < first(10, 55, 0) < middle(10, 55, 0) < policy(10, 55, 0)
    assert model_flops(load_settings({}))[2](10, 55, 0) == 0


@pytest.mark.slow
def test_the_server_starts_without_what_it_does_not_need() -> None:
    """Only the engine's process needs torch, the other packages only those who use them: each costs
    seconds and memory at a start. Looking up a model and a GPU needs none of them either."""
    heavy = {"torch", "transformers", "opentelemetry.sdk", "matplotlib", "math_verify"}
    code = (
        "import sys, server.assemble; from server.settings import load_settings; "
        f"load_settings({{}}, policy_model='a/b'); print(*sorted({heavy} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_a_judge_needs_no_reward_model() -> None:
    """With a generative format no reward model is loaded, and none is counted."""
    settings = load_settings({}, reward_format="generative")
    options = engine_options(settings)
    assert (options.prm, options.reward_format) == (None, "generative")
    assert model_flops(settings)[1] is no_flops
    default = engine_options(load_settings({}))
    assert (default.prm, default.reward_format) == (str(SPRIG_FOLDER / "prm"), "math-shepherd")
    assert model_flops(load_settings({}))[1] is not no_flops


def test_without_the_reward_model_it_needs_a_format_is_none() -> None:
    """The format becomes ``none``: rewards are the policy's own likelihoods."""
    options = engine_options(load_settings({"HEDGEROW_REWARD_MODEL": "none"}))
    assert (options.prm, options.reward_format) == (None, "none")


def test_unknown_formats_are_refused_by_key() -> None:
    """The error names the key, the value and the known formats."""
    with pytest.raises(SettingsError, match=r"HEDGEROW_REWARD_FORMAT = 'oracle': .* math-shepherd"):
        load_settings({"HEDGEROW_REWARD_FORMAT": "oracle"})
