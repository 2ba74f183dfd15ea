"""A model's cache with holes against the same model under a mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtest.token_eviction.path_cache import PartialPath, PathCache, PathReader
from runtime.embedded.model.config import middle_layer
from tests.runtime.tiny_models import make_checkpoint

LENGTH = 50
IDS = np.random.default_rng(0).integers(0, 250, LENGTH)
GONE = np.array([3, 4, 5, 17, 30, 31, 40])
KEPT = np.setdiff1d(np.arange(LENGTH), GONE)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


def read_path(reader: PathReader, path: PartialPath, at: np.ndarray) -> PathCache:
    """Read the tokens at positions ``at`` on top of ``path``; returns the cache."""
    cache = PathCache([path])
    reader.read(cache, IDS[at][None], at[None])
    return cache


def test_a_row_reads_what_is_there_at_its_own_position(checkpoint: Path) -> None:
    """For the last of 50 tokens with seven keys missing, logits are transformers' under a mask, and
    so is the attention of the middle layer, which adds up to 1."""
    reader, last = PathReader(checkpoint), np.array([LENGTH - 1])
    kv = read_path(reader, reader.nothing, np.arange(LENGTH - 1)).kv_read(0)
    ours = read_path(reader, PartialPath(KEPT[:-1], kv[..., KEPT[:-1], :]), last)
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
    np.testing.assert_allclose(ours.paid[0], layer[0].mean(0)[0, KEPT], atol=1e-5)
    assert ours.paid.sum() == pytest.approx(1.0, abs=1e-6)


def test_what_was_given_up_is_computed_again_from_what_is_left(checkpoint: Path) -> None:
    """After filling several holes and reading the last token, logits and keys are as without."""
    reader = PathReader(checkpoint)
    full = read_path(reader, reader.nothing, np.arange(LENGTH))
    kv, places = full.kv_read(0), KEPT[:-1]
    again = read_path(reader, PartialPath(places, kv[..., places, :]), np.append(GONE, LENGTH - 1))
    np.testing.assert_allclose(again.logits, full.logits, atol=1e-5)
    np.testing.assert_allclose(again.kv_read(0)[..., :-1, :], kv[..., GONE, :], atol=1e-5)
    assert again.paid.sum() == pytest.approx(len(GONE) + 1, abs=1e-5)


def test_paths_side_by_side_do_not_read_each_other(checkpoint: Path) -> None:
    """Paths of 10 and 30 tokens read two rows each; then the short one is selected alone."""
    reader = PathReader(checkpoint)
    paths = [
        PartialPath(np.arange(n), read_path(reader, reader.nothing, np.arange(n)).kv_read(0))
        for n in (10, 30)
    ]
    both = PathCache(paths)
    for step in range(2):
        at = np.array([[10 + step], [30 + step]])
        reader.read(both, IDS[at], at)
    alone = [read_path(reader, path, len(path.places) + np.arange(2)) for path in paths]
    np.testing.assert_allclose(both.logits, [cache.logits[0] for cache in alone], atol=1e-5)
    both.batch_select_indices(torch.tensor([0]))
    np.testing.assert_allclose(both.kv_read(0), alone[0].kv_read(0), atol=1e-5)
    np.testing.assert_allclose(both.paid[0, -12:], alone[0].paid[0], atol=1e-5)
    assert both.logits.shape[0] == len(both.places) == 1
