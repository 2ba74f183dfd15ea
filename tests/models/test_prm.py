"""How the reward model is made of the policy, and where its labels are read."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from models.train.batches import IGNORED, MicroBatch, Row, load_tokenizer
from models.train.labelled import Labelled
from models.train.network import decoder_layers, new_model, read_out, streams
from models.train.prm import (
    COUNTED,
    FAULT,
    PHASES,
    epochs,
    label_ids,
    label_losses,
    shortened,
    with_layers_above,
)
from models.train.rows import IN_PLACE, MOVES_TO_GO

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    """A small policy whose layers all change the stream."""
    model = new_model("draft", load_tokenizer(), 1)
    for layer in decoder_layers(model):
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.02)
    return model


def test_layers_above_say_nothing_at_first(policy: LlamaForCausalLM) -> None:
    """The policy's layers have the policy's streams, and the layers above do not change them."""
    deeper = with_layers_above(policy, 2)
    before, after = streams(policy, IDS), streams(deeper, IDS)
    assert len(after) == len(before) + 2
    for mine, theirs in zip(after, [*before, before[-1], before[-1]], strict=True):
        assert torch.equal(mine, theirs)


def outspoken(policy: LlamaForCausalLM) -> LlamaForCausalLM:
    """The policy with two more layers, the last of which changes the stream."""
    model = with_layers_above(policy, 2)
    torch.nn.init.normal_(decoder_layers(model)[-1].mlp.down_proj.weight, std=0.05)
    return model


@pytest.mark.parametrize("at_tag", [False, True])
def test_words_are_read_before_the_last_layer_and_tags_behind_it(
    policy: LlamaForCausalLM, at_tag: bool
) -> None:
    """By hand: cross entropy of the two signs; a wrong word weighs FAULT, a judge's tag 10."""
    tokens = label_ids(load_tokenizer())
    model = outspoken(policy)
    ids, labels = IDS.clone(), torch.full_like(IDS, IGNORED)
    ids[0, 3] = tokens.tag if at_tag else 8
    labels[0, 3] = 1
    batch = MicroBatch(ids, labels, ["wordproblem"])
    (loss,) = label_losses(model, tokens, PHASES["judge"], batch)
    stream = streams(model, ids)[-1 if at_tag else -2][0, 3]
    expected = -read_out(model, stream)[tokens.signs].log_softmax(-1)[1]
    assert loss.item() == pytest.approx((10.0 if at_tag else FAULT) * expected.item(), rel=1e-5)


def test_moves_to_go_are_told_apart_by_numbers(policy: LlamaForCausalLM) -> None:
    """By hand: cross entropy of the numbers 0 to 15 before the last layer, beside that of signs."""
    tokens, model = label_ids(load_tokenizer()), outspoken(policy)
    labels = torch.full_like(IDS, IGNORED)
    labels[0, 1:3] = torch.tensor([MOVES_TO_GO + 7, 0])
    batch = MicroBatch(IDS, labels, ["blocksworld"])
    moves, word = label_losses(model, tokens, PHASES["walk"], batch).tolist()
    logits = read_out(model, streams(model, IDS)[-2][0, 1:3])
    expected = -logits[0, tokens.numbers].log_softmax(-1)[7]
    assert moves == pytest.approx(COUNTED * expected.item(), rel=1e-5)
    assert word == pytest.approx(-logits[1, tokens.signs].log_softmax(-1)[0].item(), rel=1e-5)


def test_blocks_that_stay_are_read_early(policy: LlamaForCausalLM) -> None:
    """By hand: cross entropy of 0 and 1 three layers before the last."""
    tokens, model = label_ids(load_tokenizer()), outspoken(policy)
    labels = torch.full_like(IDS, IGNORED)
    labels[0, 1] = IN_PLACE + 1
    (loss,) = label_losses(model, tokens, PHASES["walk"], MicroBatch(IDS, labels, ["blocksworld"]))
    logits = read_out(model, streams(model, IDS)[-4][0, 1])[tokens.numbers[:2]]
    assert loss.item() == pytest.approx(-logits.log_softmax(-1)[1].item(), rel=1e-5)


def test_a_reply_is_cut_soon_behind_its_first_wrong_step() -> None:
    """Three in four wrong replies keep one to three wrong steps, the rest and right ones all."""
    spoilt = Labelled("game24", "", [[i] for i in range(8)], [True] * 2 + [False] * 6)
    rng = random.Random(1)
    lengths = [len(shortened(spoilt, rng).steps) for _ in range(400)]
    assert {*lengths} == {3, 4, 5, 8}
    assert lengths.count(8) == pytest.approx(100, abs=30)
    right = spoilt._replace(labels=[True] * 8)
    assert all(shortened(right, rng) == right for _ in range(20))


def test_an_epoch_is_every_row_once_shared_by_the_processes() -> None:
    rows = [Row(str(i), [i], [0]) for i in range(128)]
    shares = [epochs(rows, 64, rank, 2) for rank in range(2)]
    for epoch in ((0, 1), (2, 3)):
        kinds = [row.kind for draw in shares for step in epoch for row in draw(step)]
        assert sorted(kinds) == sorted(row.kind for row in rows)
    assert [row.kind for row in shares[0](0)] != [row.kind for row in shares[0](2)]
