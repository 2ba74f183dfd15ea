"""The embedded forward against Hugging Face's own, on every architecture."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.config import ModelConfig, UnsupportedModel
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.selfcheck import QUERY_TILES, ROW_TILES
from tests.runtime.kernels import KERNELS
from tests.runtime.tiny_models import ARCHITECTURES, make_checkpoint

SPRIG = Path(__file__).parents[2] / "models/sprig/policy"


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "sprig"])
def checkpoint(request, tmp_path_factory) -> Path:
    if request.param == "sprig":
        if not (SPRIG / "model.safetensors").is_file():
            pytest.skip("the bundled policy is not trained yet")
        return SPRIG
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama")


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, length)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_are_hugging_faces(checkpoint, kernel):
    """A prefill of 150 tokens gives transformers' float32 logits to 1e-4."""
    ids = prompt(150)
    forward = Forward(checkpoint, threads=1, kernel=kernel)
    ours = forward.run([Span(ids, 0, np.arange(150), 0)], forward.new_store(150))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids)[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_greedy_is_generate(checkpoint):
    """Prefill, then 60 greedy tokens one by one: the same ids as ``generate``, past any window."""
    ids = prompt(30, seed=1)
    forward = Forward(checkpoint, threads=1)
    store, slots = forward.new_store(90), np.arange(90)
    logits = forward.run([Span(ids, 0, slots[:30], 29)], store)
    tokens = [int(logits.argmax())]
    while len(tokens) < 60:
        at = 30 + len(tokens)
        step = Span(np.array(tokens[-1:]), at - 1, slots[:at], 0)
        tokens.append(int(forward.run([step], store).argmax()))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = model.generate(
        torch.from_numpy(ids)[None], max_new_tokens=60, do_sample=False, eos_token_id=None
    )
    assert tokens == expected[0, 30:].tolist()


def test_logits_come_for_the_rows_asked_in_span_order(llama):
    """``logits_from`` n asks for no row, n - 1 for the last; rows come in span order."""
    forward = Forward(llama, threads=1)
    store, ids = forward.new_store(200), prompt(100)
    whole = forward.run([Span(ids, 0, np.arange(100), 0)], store)
    spans = [
        Span(ids[:3], 0, np.arange(100, 103), 2),
        Span(ids[:50], 0, np.arange(103, 153), 50),
        Span(ids[99:], 99, np.arange(100), 0),
        Span(ids[:40], 0, np.arange(153, 193), 38),
    ]
    assert torch.equal(forward.run(spans, store), whole[[2, 99, 38, 39]])
    assert forward.run([Span(ids[:5], 0, np.arange(5), 5)], store).shape == (0, 261 + 5)


def test_the_plain_forward_is_close_but_no_promise(llama):
    """With ``exact`` False logits agree to 1e-4 and no row tiles are used."""
    exact, plain = Forward(llama, threads=1), Forward(llama, exact=False, threads=1)
    span = [Span(prompt(70), 0, np.arange(70), 0)]
    ours, theirs = (f.run(span, f.new_store(70)) for f in (exact, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert plain.tiles.rows == ()
    assert set(exact.tiles.rows) <= set(ROW_TILES)
    assert set(exact.tiles.queries) <= set(QUERY_TILES)


def test_positions_beyond_the_context_are_refused(llama):
    """The error names both sizes."""
    forward = Forward(llama, threads=1)
    with pytest.raises(ValueError, match="513 positions; the context is 512"):
        forward.run([Span(prompt(1), 512, np.arange(513), 0)], forward.new_store(513))


def test_flops_by_hand():
    """One layer of 8 units, 2 heads of 4 sharing one key head, ffn 16, 10 words, 3 rows."""
    config = ModelConfig(
        architecture="llama",
        layers=1,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn=16,
        vocab=10,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tied=False,
        sliding_window=None,
        context=64,
    )
    linear = 8 * 16 + 8 * 8 + 3 * 8 * 16  # qkv, output, gate + up + down
    attention = 2 * 8 * (1 + 2 + 3)  # scores and mixes of 8 query elements with 6 keys
    assert config.flops(3, 6) == 2 * (3 * linear + attention + 3 * 80)
    assert config.flops(3, 6, logits=1) == 2 * (3 * linear + attention + 80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(llama, tmp_path, change, message):
    """Checkpoints with unsupported settings are refused at the start by name."""
    raw = json.loads((llama / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_checkpoint(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    """An untied configuration without a head's tensor is refused, naming the tensor."""
    folder = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight is missing"):
        Forward(folder, threads=1)
