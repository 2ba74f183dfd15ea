"""Seeded sampling as the plug-in does it, against the embedded engine's own draw; no SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hedgerow_sglang import noise
from hedgerow_sglang.plugin import make_cache, supported, version_of
from hedgerow_sglang.plugin_protocol import sampling_seed
from hedgerow_sglang.seeded_sampling import (
    gumbel_of,
    hashes,
    sample,
    seeded_batch,
    truncated,
)
from runtime.embedded.sampler import sample as sample_embedded

VOCAB = 97
EVERY = 1 << 30
"""The top_k that SGLang uses for "no limit"."""


def info(seeds: list[int], top_ps: list[float], top_ks: list[int] | None = None) -> SimpleNamespace:
    """SGLang's sampling info of a batch."""
    ks = top_ks or [EVERY] * len(seeds)
    return SimpleNamespace(
        sampling_seed=torch.tensor([sampling_seed(seed) for seed in seeds]),
        top_ks=torch.tensor(ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.zeros(len(seeds)),
        need_top_p_sampling=any(p < 1 for p in top_ps),
        need_top_k_sampling=any(k < EVERY for k in ks),
        need_min_p_sampling=False,
    )


def rows_of(seed: int, rows: int) -> np.ndarray:
    """Random logits (rows, VOCAB)."""
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


@pytest.mark.promise(
    "The SGLang plug-in draws the same token as the embedded engine from equal logits and an equal "
    "seed."
)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.7, 1.0]),
)
def test_a_token_is_the_embedded_engines(
    case: int, seeds: list[int], top_p: float, temperature: float
) -> None:
    """SGLang counts positions by the last token read, the embedded engine by the one drawn."""
    logits = rows_of(case, len(seeds))
    positions = torch.arange(len(seeds)) + 10
    probs = torch.softmax(torch.from_numpy(logits) / temperature, -1)
    ours = sample(probs, info(seeds, [top_p] * len(seeds)), positions)
    theirs = sample_embedded(logits, seeds, positions.numpy() + 1, temperature, top_p)
    assert ours.dtype == torch.int32
    assert ours.tolist() == theirs.tokens.tolist()


def test_what_may_be_drawn_by_hand() -> None:
    """By top-p, 0.4 and 0.3 suffice for 0.69; min-p 0.5 keeps from 0.2 up; ties go by lower id."""
    probs = torch.tensor([[0.1, 0.3, 0.4, 0.2]] * 3 + [[0.25] * 4], dtype=torch.float64)
    top_ks = torch.tensor([EVERY, EVERY, 3, 2])
    top_ps = torch.tensor([0.69, 1.0, 1.0, 1.0])
    min_ps = torch.tensor([0.0, 0.5, 0.0, 0.0])
    row, token, whole = truncated(probs, top_ks, top_ps, min_ps)
    assert [token[row == i].tolist() for i in range(4)] == [[1, 2], [1, 2, 3], [1, 2, 3], [0, 1]]
    assert not whole.any()
    top_ks[2], top_ps[0] = EVERY, 1.0
    row, _, whole = truncated(probs, top_ks, top_ps, min_ps)
    assert whole.tolist() == [True, False, True, False]
    assert set(row.tolist()) == {1, 3}


def test_noise_is_the_embedded_engines_bit_for_bit() -> None:
    seeds = [0, 2**63, 2**64 - 1]
    signed = torch.tensor([sampling_seed(s) for s in seeds])
    ours = gumbel_of(hashes(signed, torch.tensor([1, 2, 3]), VOCAB))
    assert np.array_equal(ours.numpy(), noise.gumbel(np.array(seeds, np.uint64), [1, 2, 3], VOCAB))


def test_every_row_of_a_batch_has_a_seed() -> None:
    """A request's own seed, or one derived from its id; a batch that has seeds is not changed."""

    def request(rid: str, seed: int | None) -> SimpleNamespace:
        params = SimpleNamespace(sampling_seed=seed, custom_params=None)
        return SimpleNamespace(rid=rid, sampling_params=params)

    batch = SimpleNamespace(reqs=[request("a", -5), request("b", None), request("c", None)])
    bare = SimpleNamespace(sampling_seed=None, device="cpu")
    seeded_batch(bare, object, batch)
    assert bare.sampling_seed[0].item() == -5
    assert bare.sampling_seed[1] != bare.sampling_seed[2]
    seeded = SimpleNamespace(sampling_seed=torch.tensor([1, 2, 3]), device="cpu")
    seeded_batch(seeded, object, batch)
    assert seeded.sampling_seed.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5.15", False), ("0.5.16.post1", True), ("0.5.23", True), ("0.5.24", False), ("x", False)],
)
def test_versions_that_are_served(text: str, expected: bool) -> None:
    assert supported(version_of(text)) is expected


@pytest.mark.parametrize(
    ("version", "context", "message"),
    [
        (
            "0.5.24",
            {},
            "--radix-cache-backend hedgerow: SGLang 0.5.24; 0.5.16 to 0.5.23 is supported",
        ),
        ("0.5.23", {"is_hybrid_swa": True}, "sliding-window attention"),
        ("0.5.23", {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ],
)
def test_what_it_cannot_serve_it_refuses_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, context: dict[str, bool], message: str
) -> None:
    """Start-up is refused for unknown versions, whose names may differ, and unsupported options."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    with pytest.raises(ValueError, match=message):
        make_cache("arborkv", SimpleNamespace(**context))


def draw_by_definition(probs: torch.Tensor, batch: SimpleNamespace, at: torch.Tensor) -> list[int]:
    """The token of each row, with all tokens sorted and all noise computed."""
    tokens = []
    for row, p in enumerate(probs.double()):
        falling, order = p.sort(descending=True, stable=True)
        before = falling.cumsum(0) - falling
        mask = torch.arange(len(p)) < batch.top_ks[row]
        mask &= before < batch.top_ps[row].double() * p.sum()
        mask &= falling >= batch.min_ps[row].double() * falling[0]
        weights = torch.zeros_like(p).scatter(0, order[mask], p[order[mask]])
        gumbel = noise.gumbel(
            batch.sampling_seed[[row]].numpy().astype(np.uint64), [int(at[row]) + 1], len(p)
        )
        tokens.append(int((weights.log() + torch.from_numpy(gumbel[0])).argmax()))
    return tokens


@given(st.integers(0, 2**32), st.sampled_from([0.1, 3.0, 12.0]), st.sampled_from([40, 3000]))
def test_little_is_computed_and_nothing_is_missed(case: int, spread: float, vocab: int) -> None:
    """One batch mixes rows without limits, with top-k (1 is greedy), top-p and min-p, and ties."""
    dice = np.random.default_rng(case)
    logits = dice.normal(0, spread, (6, vocab)).round(1).astype(np.float32)
    batch = info(
        dice.integers(0, 2**63, 6).tolist(),
        dice.choice([0.2, 0.9, 0.99, 1.0], 6).tolist(),
        dice.choice([1, 5, 20, EVERY], 6).tolist(),
    )
    batch.min_ps = torch.from_numpy(dice.choice([0.0, 0.1], 6).astype(np.float32))
    batch.need_min_p_sampling = True
    probs, at = torch.softmax(torch.from_numpy(logits), -1), torch.arange(6) + 3
    assert sample(probs, batch, at).tolist() == draw_by_definition(probs, batch, at)


def test_numbers_that_are_none_end_nothing() -> None:
    """For NaN or all-zero probabilities some id of the vocabulary is drawn; nothing is raised."""
    probs = torch.full((2, VOCAB), torch.nan)
    probs[1] = 0.0
    assert all(0 <= token < VOCAB for token in sample(probs, info([1, 2], [1.0, 0.9]), read_at(2)))


def read_at(rows: int) -> torch.Tensor:
    """Positions of the last tokens read, one for each row."""
    return torch.arange(rows) + 7
