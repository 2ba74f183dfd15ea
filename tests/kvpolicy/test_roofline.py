"""The roofline split: by hand, against brute force, and which model it must favour."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.roofline import (
    DevicePeaks,
    ModelCosts,
    SplitLoad,
    TooLittleMemory,
    decode_seconds,
    even,
    offloaded,
    prefill_seconds,
    roofline,
)

SMALL = ModelCosts(token_flops=2.0, pair_flops=0.0, weight_bytes=100.0, kv_bytes=1)
DEVICE = DevicePeaks(flops=100.0, bandwidth=100.0)


def test_a_split_worked_by_hand() -> None:
    """N = 4, S = 10, L = 10: a verifier of 10 bytes a sequence beside a generator of 20.

    Of 90 bytes Bp = 1 leaves 80 for Bd = 4: prefill 4 x max(0.2, 1.1) = 4.4 s, decode 10 x
    max(0.08, 1.6) = 16 s. Bp = 2 leaves Bd = 3, which needs two batches: 2.4 + 2 x 10 x 1.45.
    """
    split = roofline(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), 90)
    assert (split.verifier_batch, split.generator_batch) == (1, 4)
    assert split.prefill_seconds == pytest.approx(4.4)
    assert split.decode_seconds == pytest.approx(16.0)
    assert (split.verifier_bytes, split.generator_bytes) == (10, 80)
    assert (split.prefill_bound, split.decode_bound) == ("memory", "memory")
    half = even(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), 90)
    assert (half.verifier_batch, half.generator_batch) == (4, 2)
    assert half.seconds > split.seconds
    roomy = roofline(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), 900)
    assert (roomy.verifier_bytes, roomy.generator_bytes) == (300, 600), "as 10 to 20"
    for budget, batch in ((70, 3), (900, 4)):
        assert even(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), budget).verifier_batch == batch


def test_a_large_prefill_is_bound_by_arithmetic_and_a_decode_by_memory() -> None:
    """This asymmetry is what makes an uneven split pay."""
    model = ModelCosts(token_flops=3e9, pair_flops=2e5, weight_bytes=3e9, kv_bytes=28_000)
    gpu = DevicePeaks(flops=1e14, bandwidth=1e12)
    assert prefill_seconds(model, gpu, 8, 500)[1] == "arithmetic"
    assert decode_seconds(model, gpu, 8, 500)[1] == "memory"
    split = roofline(model, model, gpu, SplitLoad(64, 500, 200), 2_000_000_000)
    assert split.generator_bytes > 5 * split.verifier_bytes


def test_an_engine_that_keeps_kv_by_hand() -> None:
    """N = 4, S = 10, L = 2, arithmetic alone: a verifier of 10 bytes beside a generator of 12.

    Of 68 bytes Bp = 2 leaves 48, Bd = 4: half of the sequences have 8 of 10 tokens kept, so 4 x
    (10 - 4) x 0.2 = 4.8 s, and decoding 2 x 4 x 0.2 = 1.6 s. Bp = 3 leaves Bd = 3: 4 x (10 - 6) x
    0.2 = 3.2 s and 1.6 s, but the fourth sequence is read again when it enters: 2 s. The paper's
    verifier reads all of it anew and has no use for a second sequence.
    """
    light = ModelCosts(token_flops=20.0, pair_flops=0.0, weight_bytes=0.0, kv_bytes=1)
    device = DevicePeaks(flops=100.0, bandwidth=1e9)
    split = roofline(light, light, device, SplitLoad(4, 10, 2), 68, keeps=True)
    assert (split.verifier_batch, split.generator_batch) == (2, 4)
    assert split.prefill_seconds == pytest.approx(4.8)
    assert split.decode_seconds == pytest.approx(1.6)
    assert roofline(light, light, device, SplitLoad(4, 10, 2), 68).verifier_batch == 1
    assert prefill_seconds(light, device, 2, 10, 8.0)[0] == pytest.approx(2 * 2 * 0.2)


def test_room_that_costs_nothing_is_taken_where_kv_is_kept() -> None:
    """A step longer than what a sequence holds leaves nothing to keep, so no verifier batch is
    faster than another; with room for all, both have it, and the rest is shared as 10 to 30."""
    light = ModelCosts(token_flops=20.0, pair_flops=0.0, weight_bytes=0.0, kv_bytes=1)
    device = DevicePeaks(flops=100.0, bandwidth=1e9)
    split = roofline(light, light, device, SplitLoad(4, 10, 20), 800, keeps=True)
    assert (split.verifier_batch, split.generator_batch) == (4, 4)
    assert (split.verifier_bytes, split.generator_bytes) == (200, 600)
    assert roofline(light, light, device, SplitLoad(4, 10, 20), 800).verifier_batch == 1


def test_what_was_dropped_between_batches_is_read_again() -> None:
    """As above with 31 bytes: Bp = 1 leaves 21, Bd = 1. A quarter of the sequences have 8 of 10
    tokens kept: 4 x (10 - 2) x 0.2 = 6.4 s. Four batches decode for 2 x 0.2 each, and before three
    of them 10 tokens are read again: 1.6 + 3 x 2 s. A step longer than its path leaves none kept.
    """
    light = ModelCosts(token_flops=20.0, pair_flops=0.0, weight_bytes=0.0, kv_bytes=1)
    device = DevicePeaks(flops=100.0, bandwidth=1e9)
    split = roofline(light, light, device, SplitLoad(4, 10, 2), 31, keeps=True)
    assert (split.verifier_batch, split.generator_batch) == (1, 1)
    assert split.prefill_seconds == pytest.approx(6.4)
    assert split.decode_seconds == pytest.approx(1.6 + 6.0)
    long = roofline(light, light, device, SplitLoad(4, 10, 20), 130, keeps=True)
    assert long.prefill_seconds == pytest.approx(4 * 10 * 0.2)


def test_beginnings_that_are_shared_take_no_room_of_their_own() -> None:
    """N = 4 sequences of 10 tokens, 4 of them each one's own, L = 2: 4 bytes for the verifier and 6
    for the generator, so that 40 bytes hold all that 88 would if nothing were shared.

    All kept, each reads its 2 new tokens: one pass of 4 x 2 x 0.2 = 1.6 s. With 28 bytes, Bp = 1
    leaves 24, Bd = 4: a quarter of the sequences have 2 of their 4 tokens kept, so 4 x (4 - 0.5) x
    0.2 = 2.8 s. With 13 bytes, Bd = 1: 4 x 2 x 0.2 s, and 4 tokens read again before three of them.
    """
    light = ModelCosts(token_flops=20.0, pair_flops=0.0, weight_bytes=0.0, kv_bytes=1)
    device, load = DevicePeaks(flops=100.0, bandwidth=1e9), SplitLoad(4, 10, 2, own=4)
    whole = roofline(light, light, device, load, 40, keeps=True)
    assert (whole.verifier_batch, whole.generator_batch) == (4, 4)
    assert whole.prefill_seconds == pytest.approx(1.6)
    tight = roofline(light, light, device, load, 28, keeps=True)
    assert (tight.verifier_batch, tight.generator_batch) == (1, 4)
    assert tight.prefill_seconds == pytest.approx(2.8)
    short = roofline(light, light, device, load, 13, keeps=True)
    assert (short.verifier_batch, short.generator_batch) == (1, 1)
    assert short.decode_seconds == pytest.approx(1.6 + 3 * 4 * 0.2)
    assert even(light, light, device, load, 40).verifier_batch == 4
    with pytest.raises(TooLittleMemory, match="4 to verify and 6"):
        roofline(light, light, device, load, 9)
    with pytest.raises(ValueError, match="own: 11; from 0 to the length, 10"):
        SplitLoad(4, 10, 2, own=11)
    with pytest.raises(ValueError, match="own_grown: 13; from 0 to 12"):
        SplitLoad(4, 10, 2, own=4, own_grown=13)
    alike = SplitLoad(4, 10, 2, own=4, own_grown=5)  # half of what is new is drawn alike
    assert roofline(light, light, device, alike, 36, keeps=True).seconds == whole.seconds


def test_offloading_by_hand() -> None:
    """30 bytes for each in turn: three sequences of 10 are read at once, Bd = 1 draws in 20, and
    2 x (30 + 20) bytes go over at 10 a second. Reading takes 2 x (100 + 30) / 100 s, drawing 4 x 10
    x 1.15 s; shared, the 30 bytes hold one of each."""
    device = replace(DEVICE, host_bandwidth=10.0)
    load = SplitLoad(4, 10, 10)
    assert offloaded(SMALL, SMALL, DEVICE, load, 30) is None
    assert offloaded(SMALL, SMALL, device, load, 30) == pytest.approx(2.6 + 46.0 + 10.0)
    assert roofline(SMALL, SMALL, device, load, 30).seconds == pytest.approx(4 * 1.1 + 46.0)
    assert offloaded(SMALL, SMALL, device, load, 15) is None
    assert offloaded(SMALL, SMALL, device, load, 9) is None
    # With room for all in each turn, only the KV held is moved, not the whole budget.
    assert offloaded(SMALL, SMALL, device, load, 1_000) == pytest.approx(1.4 + 16.0 + 2 * 12.0)


def test_a_pass_by_hand() -> None:
    """Arithmetic: 3 tokens of 10 meet 1 + 2 + 3 keys, the last two of them 2 + 3; a new one meets
    all 5 that are held. Memory: weights of 100, and 4 bytes a token of KV, kept or not."""
    arithmetic = ModelCosts(token_flops=10.0, pair_flops=1.0, weight_bytes=0.0, kv_bytes=0)
    memory = ModelCosts(token_flops=0.0, pair_flops=0.0, weight_bytes=100.0, kv_bytes=4)
    device = DevicePeaks(flops=2.0, bandwidth=2.0)
    assert prefill_seconds(arithmetic, device, 1, 3) == ((30 + 6) / 2, "arithmetic")
    assert prefill_seconds(arithmetic, device, 2, 3, 1.0) == (20 + 5, "arithmetic")
    assert decode_seconds(arithmetic, device, 2, 5.0) == (10 + 5, "arithmetic")
    assert prefill_seconds(memory, device, 2, 3, 1.0) == ((100 + 24) / 2, "memory")
    assert decode_seconds(memory, device, 2, 5.0) == ((100 + 40) / 2, "memory")


def test_too_little_is_said_with_both_sizes() -> None:
    """A budget for less than one sequence of each model is refused, with both sizes."""
    for rule in (roofline, even):
        with pytest.raises(TooLittleMemory, match=r"budget: 15 bytes.*10 to verify and 20"):
            rule(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), 15)


def test_halves_are_whole_bytes_and_may_be_too_small_for_one_model() -> None:
    """Of 91 bytes the verifier has 45. Half of 100 holds no token of 100 bytes a piece."""
    assert even(SMALL, SMALL, DEVICE, SplitLoad(4, 10, 10), 91).verifier_bytes == 45
    large, small = replace(SMALL, kv_bytes=100), replace(SMALL, kv_bytes=3)
    with pytest.raises(TooLittleMemory, match="100 to verify and 6 to generate"):
        even(small, large, DEVICE, SplitLoad(1, 1, 1), 100)


def test_a_load_of_nothing_is_refused() -> None:
    """A load without new tokens is refused."""
    with pytest.raises(ValueError, match="new: 0"):
        SplitLoad(1, 1, 0)


MODELS = st.builds(
    ModelCosts,
    token_flops=st.floats(1, 1e3),
    pair_flops=st.floats(0, 10),
    weight_bytes=st.floats(1, 1e4),
    kv_bytes=st.integers(1, 8),
)
DEVICES = st.builds(DevicePeaks, flops=st.floats(1, 1e4), bandwidth=st.floats(1, 1e4))
LOADS = st.builds(SplitLoad, st.integers(1, 12), st.integers(1, 30), st.integers(1, 30))


@pytest.mark.promise(
    "The roofline split is the fastest of all pairs of a verifier batch and the largest generator "
    "batch that fits beside it."
)
@given(MODELS, MODELS, DEVICES, LOADS, st.integers(1, 8_000))
def test_no_pair_of_batches_is_faster(
    generator: ModelCosts, verifier: ModelCosts, device: DevicePeaks, load: SplitLoad, budget: int
) -> None:
    """Brute force over pairs of batch sizes finds no faster one; the whole budget is given out."""
    times = {}
    for batch, decoding in itertools.product(range(1, load.sequences + 1), repeat=2):
        kv_bytes = batch * load.length * verifier.kv_bytes
        kv_bytes += decoding * (load.length + load.new) * generator.kv_bytes
        if kv_bytes <= budget:
            prefill, _ = prefill_seconds(verifier, device, batch, load.length)
            decode, _ = decode_seconds(generator, device, decoding, load.length + load.new / 2)
            rounds = -(-load.sequences // batch), -(-load.sequences // decoding) * load.new
            times[batch, decoding] = rounds[0] * prefill + rounds[1] * decode
    if not times:
        with pytest.raises(TooLittleMemory):
            roofline(generator, verifier, device, load, budget)
        return
    split = roofline(generator, verifier, device, load, budget)
    largest = {b: max(d for c, d in times if c == b) for b in {b for b, _ in times}}
    assert split.seconds == pytest.approx(min(times[b, d] for b, d in largest.items()))
    assert split.verifier_bytes + split.generator_bytes == budget
    cached_split = roofline(generator, verifier, device, load, budget, keeps=True)
    assert cached_split.verifier_bytes + cached_split.generator_bytes == budget
    assert cached_split.verifier_batch >= 1
    assert cached_split.generator_batch >= 1
