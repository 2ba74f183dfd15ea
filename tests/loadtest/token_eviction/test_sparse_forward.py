"""The pass with holes against Hugging Face's own under a mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtest.token_eviction.sparse_forward import SparseForward, SparseInput
from runtime.embedded.model.config import middle_layer
from tests.runtime.tiny_models import make_checkpoint

LENGTH = 50
IDS = np.random.default_rng(0).integers(0, 250, LENGTH)
GONE = np.array([3, 4, 5, 17, 30, 31, 40])
KEPT = np.setdiff1d(np.arange(LENGTH), GONE)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


def rows(at: np.ndarray, there: np.ndarray) -> SparseInput:
    """Rows at some positions that read what is there; a token's slot is its position and 7."""
    return SparseInput(IDS[at], at, at + 7, there + 7, there)


def test_a_row_reads_what_is_there_at_its_own_position(checkpoint: Path) -> None:
    """The last of 50 tokens with seven keys gone: transformers' logits under a mask, and its
    attention in the middle layer, which adds up to 1."""
    forward = SparseForward(checkpoint)
    store = forward.new_store(LENGTH + 7)
    every = np.arange(LENGTH)
    forward.run([rows(every[:-1], every[:-1])], store)
    ours = forward.run([rows(every[-1:], KEPT)], store)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    mask = torch.full((1, 1, 1, LENGTH), torch.finfo(torch.float32).min)
    mask[..., torch.from_numpy(KEPT)] = 0
    with torch.no_grad():
        past = model(torch.from_numpy(IDS[None, :-1]), use_cache=True).past_key_values
        theirs = model(
            torch.from_numpy(IDS[None, -1:]),
            past_key_values=past,
            attention_mask=mask,
            position_ids=torch.tensor([[LENGTH - 1]]),
            output_attentions=True,
        )
    np.testing.assert_allclose(ours.logits[0], theirs.logits[0, -1], atol=1e-4, rtol=1e-4)
    layer = theirs.attentions[middle_layer(model.config.num_hidden_layers) - 1]
    np.testing.assert_allclose(ours.masses[0], layer[0].mean(0)[0, KEPT], atol=1e-5)
    assert ours.masses[0].sum() == pytest.approx(1.0, abs=1e-6)


def test_what_was_given_up_is_computed_again_in_one_pass(checkpoint: Path) -> None:
    """Holes in several places, filled from what is left beside them: the logits of no holes; in
    one pass with another path that reads what the first one fills in."""
    forward = SparseForward(checkpoint)
    store = forward.new_store(LENGTH + 7)
    every = np.arange(LENGTH)
    whole = forward.run([rows(every, every)], store).logits[0]
    with torch.inference_mode():
        for layer in store.both:
            layer.view(2 * store.kv_heads, store.rows, -1)[:, GONE + 7] = 9.0
    last = every[-1:]
    again = forward.run([rows(GONE, every), rows(last, every)], store)
    np.testing.assert_allclose(again.logits[1], whole, atol=1e-5)
    assert again.masses[0].sum() == pytest.approx(len(GONE), abs=1e-5)
    alone = forward.run([rows(last, every)], store).logits[0]
    np.testing.assert_allclose(alone, whole, atol=1e-5)
