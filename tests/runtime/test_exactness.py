"""Bit equality: a row's logits follow from its token path alone.

Every test compares with ``torch.equal``. The reference is a prefill of the sequence by itself.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.embedded.model import layers
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.threads import ThreadTuner
from tests.runtime.kernels import KERNELS
from tests.runtime.tiny_models import ARCHITECTURES, make_checkpoint

SPRIG = Path(__file__).parents[2] / "models/sprig/policy"
LENGTH = 100
WORDS = 250


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "sprig"])
def forward(request, kernel, tmp_path_factory) -> Forward:
    if request.param == "sprig":
        return Forward(SPRIG, threads=1, kernel=kernel)
    folder = tmp_path_factory.mktemp("model") / request.param
    return Forward(make_checkpoint(folder, request.param), threads=1, kernel=kernel)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "llama", hidden_size=128, intermediate_size=352
    )


def sequence(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, length)


def in_chunks(forward: Forward, tokens: np.ndarray, cuts: list[int]) -> torch.Tensor:
    """Logits of every position of a sequence that is computed in pieces ending at ``cuts``."""
    store = forward.new_store(len(tokens))
    slots = np.random.default_rng(1).permutation(len(tokens))
    logits, start = [], 0
    for end in sorted({*cuts, len(tokens)}):
        logits.append(forward.run([Span(tokens[start:end], start, slots[:end], 0)], store))
        start = end
    return torch.cat(logits)


@pytest.mark.promise(
    "Prefill and token-by-token decoding give the same logits at every position, bit for bit."
)
def test_prefill_is_decoding(forward):
    """One call for all tokens and one call for each give equal bits at every position."""
    tokens = sequence(LENGTH)
    decoded = in_chunks(forward, tokens, list(range(1, LENGTH)))
    assert torch.equal(in_chunks(forward, tokens, []), decoded)


@pytest.mark.promise(
    "A decoded token has the same logits, bit for bit, alone and among 7 or 64 others, in any "
    "order."
)
def test_alone_is_among_others_in_any_order(forward):
    """A decoded row has the same bits among 7 or 64 rows of other lengths, in any order."""
    generator = np.random.default_rng(3)
    lengths = [LENGTH, *generator.integers(1, 140, 64)]
    store = forward.new_store(sum(map(int, lengths)))
    spans, used = [], 0
    for number, length in enumerate(map(int, lengths)):
        tokens, slots = sequence(length, number), np.arange(used, used + length)
        used += length
        forward.run([Span(tokens, 0, slots, length)], store)
        spans.append(Span(tokens[-1:], length - 1, slots, 0))
    alone = [forward.run([span], store)[0] for span in spans]
    for company in (8, 65):
        order = generator.permutation(company)
        together = forward.run([spans[i] for i in order], store)
        assert all(torch.equal(row, alone[i]) for row, i in zip(together, order, strict=True))


@pytest.mark.promise(
    "Branches that share a prefix's KV have the same logits, bit for bit, as with a copy each."
)
def test_a_shared_prefix_is_its_copies(forward):
    """Forks that share slots and forks with copies of the prefix have equal bits."""
    prefix, forks = sequence(77), [sequence(9, 10 + i) for i in range(20)]
    store = forward.new_store(77 + 20 * 9)
    shared = np.arange(77)
    forward.run([Span(prefix, 0, shared, 77)], store)
    fork_slots = [77 + 9 * i + np.arange(9) for i in range(20)]
    spans = [
        Span(fork, 77, np.concatenate([shared, slots]), 0)
        for fork, slots in zip(forks, fork_slots, strict=True)
    ]
    together = forward.run(spans, store).view(20, 9, -1)
    for fork, ours in zip(forks, together, strict=True):
        copy = in_chunks(forward, np.concatenate([prefix, fork]), [])
        assert torch.equal(ours, copy[77:])


@pytest.mark.promise("Prefill and decoding in one batch change no bit of each other's logits.")
def test_prefill_beside_decoding(forward):
    """A chunk of prefill in the same call as decoded rows changes neither."""
    tokens, other = sequence(LENGTH), sequence(80, 5)
    store = forward.new_store(LENGTH + 80)
    slots, others = np.arange(LENGTH), np.arange(LENGTH, LENGTH + 80)
    alone, other_alone = in_chunks(forward, tokens, []), in_chunks(forward, other, [])
    forward.run([Span(tokens[:-1], 0, slots[:-1], LENGTH)], store)
    mixed = [Span(other, 0, others, 0), Span(tokens[-1:], LENGTH - 1, slots, 0)]
    logits = forward.run(mixed, store)
    assert torch.equal(logits[:-1], other_alone)
    assert torch.equal(logits[-1], alone[-1])


@pytest.mark.promise(
    "Prefill gives the same logits at every position, bit for bit, in whatever chunks it is "
    "computed."
)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=8))
def test_chunking_changes_nothing(llama_forward, whole, cuts):
    """Every position has the same bits for any chunks of the prefill."""
    assert torch.equal(in_chunks(llama_forward, sequence(LENGTH), cuts), whole)


@pytest.fixture(scope="module")
def llama_forward(llama, kernel) -> Forward:
    return Forward(llama, threads=1, kernel=kernel)


@pytest.fixture(scope="module")
def whole(llama_forward) -> torch.Tensor:
    return in_chunks(llama_forward, sequence(LENGTH), [])


@pytest.mark.promise("A batch has the same logits, bit for bit, with one, two and three threads.")
@pytest.mark.slow
def test_one_thread_is_two(llama_forward, llama, kernel):
    """A batch large enough to be split between threads: equal bits with 1, 2 and 3 of them."""
    spans = [
        Span(sequence(60, i), 0, np.arange(60 * i, 60 * i + 60), 0 if i < 5 else 59)
        for i in range(12)
    ]
    expected = llama_forward.run(spans, llama_forward.new_store(720))
    for threads in (2, 3):
        forward = Forward(llama, threads=threads, kernel=kernel)
        assert torch.equal(expected, forward.run(spans, forward.new_store(720)))
    forward = Forward(llama, threads=(1, 2, 3), kernel=kernel)
    for threads in (1, 3, 2):
        forward.threads = ThreadTuner((threads,))
        assert torch.equal(expected, forward.run(spans, forward.new_store(720)))


def test_a_store_in_use_is_a_fresh_one(llama_forward, whole):
    """Slots that held another sequence before give the bits of a fresh store."""
    store = llama_forward.new_store(LENGTH)
    slots = np.arange(LENGTH)[::-1].copy()
    llama_forward.run([Span(sequence(LENGTH, 9), 0, slots, LENGTH)], store)
    tokens = sequence(LENGTH)
    first = llama_forward.run([Span(tokens[:40], 0, slots[:40], 0)], store)
    rest = llama_forward.run([Span(tokens[40:], 40, slots, 0)], store)
    assert torch.equal(torch.cat([first, rest]), whole)


@pytest.mark.promise(
    "The plain forward pass has no such guarantee: its prefill and decoding agree to about 1e-4, "
    "not bit for bit."
)
def test_the_plain_forward_makes_no_such_promise(llama, monkeypatch):
    """Without tiles some bit differs between prefill and decoding, so these tests can fail.

    oneDNN is turned off, because it is exact without tiles."""
    monkeypatch.setattr(layers, "PACKED", False)
    plain = Forward(llama, exact=False, threads=1, kernel="torch")
    tokens = sequence(LENGTH)
    decoded = in_chunks(plain, tokens, list(range(1, LENGTH)))
    prefilled = in_chunks(plain, tokens, [])
    assert not torch.equal(prefilled, decoded)
    torch.testing.assert_close(prefilled, decoded, atol=1e-4, rtol=1e-4)
