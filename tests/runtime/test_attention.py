"""The attention plan and its arithmetic against a direct softmax."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.embedded.model.attention import Attention, NativeAttention, Tiling, build_tiling
from runtime.embedded.model.batch_plan import BLOCK, BatchPlan, KVStore, Span, build_plan
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.layers import Workspace, cut
from runtime.embedded.model.native import native
from tests.runtime.kernels import KERNELS

HEADS, KV_HEADS, SIZE = 4, 2, 16
SIZES = 16, 4, 2
CONFIG = ModelConfig(
    architecture="llama",
    layers=1,
    hidden=64,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=SIZE,
    ffn=96,
    vocab=300,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    tied=False,
    sliding_window=None,
    context=4096,
)


def span(start: int, slots: list[int]) -> Span:
    new = len(slots) - start
    return Span(np.zeros(new, np.int64), start, np.array(slots, np.int64), new)


def plan_of(spans: list[Span], store: KVStore, window: int | None = None) -> BatchPlan:
    return build_plan(spans, padding=store.padding, window=window)


def tiling_of(spans: list[Span], store: KVStore) -> Tiling:
    return build_tiling(plan_of(spans, store), SIZES, KV_HEADS, store.rows)


def filled(slots: int) -> KVStore:
    """A store whose every slot but the padding holds random keys and values."""
    store = KVStore(CONFIG, slots)
    seed = torch.Generator().manual_seed(slots)
    both = store.both[0]
    both.copy_(torch.randn(both.shape, generator=seed))
    both[store.index(torch.tensor([store.padding]))] = 0.0
    return store


def attended(
    kernel: str,
    spans: list[Span],
    query: torch.Tensor,
    store: KVStore,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of every row, in span order. ``query`` (rows, HEADS x SIZE) is scaled already."""
    plan, space = plan_of(spans, store, window), Workspace()
    order = torch.from_numpy(plan.rows.order)
    out = torch.zeros(len(order), HEADS, SIZE)
    attention = (
        NativeAttention(native(), plan, CONFIG, space)
        if kernel == "native"
        else Attention(plan, SIZES, CONFIG, store.rows, space)
    )
    attention.run(query[order].view(out.shape), store.keys[0], store.values[0], out)
    result = torch.empty_like(query)
    result[order] = out.view(query.shape)
    return result


def directly(spans: list[Span], query: torch.Tensor, store: KVStore, window: int | None = None):
    """softmax(q K) V in float64, row by row and head by head."""
    rows = []
    for s in spans:
        for position in range(s.start, len(s.slots)):
            first = 0 if window is None else max(0, position - window + 1)
            slots = torch.from_numpy(s.slots[first : position + 1])
            q = query[len(rows)].view(HEADS, SIZE).double()
            heads = []
            for head in range(HEADS):
                at = slots + (head // (HEADS // KV_HEADS)) * store.rows
                weight = torch.softmax(store.keys[0][at].double() @ q[head], 0)
                heads.append(weight @ store.values[0][at].double())
            rows.append(torch.cat(heads))
    return torch.stack(rows)


@st.composite
def trees(draw) -> tuple[list[Span], int]:
    """Spans that fork from a common prefix, with private tails, in scattered slots."""
    shared = draw(st.integers(0, 80))
    tails = draw(
        st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=9)
    )
    total = shared + sum(length for length, _ in tails)
    scattered = np.random.default_rng(draw(st.integers(0, 999))).permutation(total).tolist()
    prefix, rest, spans = scattered[:shared], scattered[shared:], []
    for length, new in tails:
        tail, rest = rest[:length], rest[length:]
        spans.append(span(shared + length - min(new, length), prefix + tail))
    return spans, total


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(tree=trees(), window=st.sampled_from([None, 1, 20, 45]))
def test_equals_the_direct_softmax(kernel, tree, window):
    """Forks, chunks, partial blocks and a sliding window give softmax(q K) V to 1e-5."""
    spans, total = tree
    store = filled(total)
    rows = sum(len(s.tokens) for s in spans)
    query = torch.randn(rows, HEADS * SIZE, generator=torch.Generator().manual_seed(1))
    ours = attended(kernel, spans, query, store, window)
    torch.testing.assert_close(
        ours.double(), directly(spans, query, store, window), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(tree=trees(), window=st.sampled_from([None, 40]))
def test_a_span_never_depends_on_others(kernel, tree, window):
    """A span's output has the same bits alone as among others."""
    spans, total = tree
    store = filled(total)
    rows = np.cumsum([0] + [len(s.tokens) for s in spans])
    query = torch.randn(int(rows[-1]), HEADS * SIZE, generator=torch.Generator().manual_seed(1))
    together = attended(kernel, spans, query, store, window)
    for i, single in enumerate(spans):
        mine = slice(rows[i], rows[i + 1])
        alone = attended(kernel, [single], query[mine], store, window)
        assert torch.equal(alone, together[mine])


def test_a_shared_block_is_read_once_a_tile():
    """16 forks of 64 shared tokens: 2 tiles of 16 rows for the prefix, a small one for a tail."""
    spans = [span(64, [*range(64), 64 + i]) for i in range(16)]
    tiling = tiling_of(spans, KVStore(CONFIG, 100))
    assert [(s.size, s.tiles) for s in tiling.strips] == [(16, 2), (2, 16)]


def test_unshared_copies_are_read_apart():
    """Two sequences without common slots are read in strips of their own."""
    spans = [span(63, list(range(64))), span(63, list(range(64, 128)))]
    assert sum(s.tiles for s in tiling_of(spans, KVStore(CONFIG, 128)).strips) == 4


def test_only_unfinished_blocks_are_masked():
    """A row at position 70 sees two whole blocks unmasked and 7 keys of the third."""
    tiling = tiling_of([span(70, list(range(71)))], KVStore(CONFIG, 100))
    assert tiling.columns == ((0, 1), (1, 1), (2, 1))
    assert tiling.hidden == ((2, 3),)
    assert tiling.mask.tolist() == [[False] * 7 + [True] * (BLOCK - 7)]


def test_blocks_before_the_window_are_left_out():
    """With a window of 20 a row at position 100 reads the blocks of keys 81 .. 100 only."""
    plan = plan_of([span(100, list(range(101)))], KVStore(CONFIG, 200), window=20)
    assert plan.rows.first.tolist() == [2]
    assert plan.rows.count.tolist() == [2]


@pytest.mark.parametrize(
    ("tokens", "start", "slots"), [(0, 3, 3), (2, 3, 4), (1, 3, 5), (1, -1, 0)]
)
def test_a_span_that_does_not_fit_together_is_refused(tokens, start, slots):
    """Spans whose tokens, start and slots do not fit together are refused."""
    wrong = Span(np.zeros(tokens, np.int64), start, np.zeros(slots, np.int64), 0)
    with pytest.raises(AssertionError, match="a span without tokens"):
        plan_of([span(0, [0]), wrong], KVStore(CONFIG, 10))


@given(rows=st.integers(1, 1000))
def test_row_tiles_cover_the_rows_with_little_to_spare(rows):
    """Tiles are contiguous, cover every row, and waste less than half of the largest tile."""
    pieces = cut(rows, (64, 16, 4))
    assert pieces[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert all(end - start in {64, 16, 4} for start, end in pieces)
    assert rows <= pieces[-1][1] < rows + 32
