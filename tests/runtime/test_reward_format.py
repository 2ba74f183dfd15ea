"""Reward formats as data: the built-in ones, format files, and what is refused."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.reward_format import (
    REWARD_FORMATS,
    RewardFormat,
    fill_template,
    local_reward_format,
    reward_format,
)
from runtime.reward_reader import (
    Head,
    Mean,
    PolicyIds,
    Reader,
    Softmax,
    outputs_misfit,
    overhead_of,
    paths_of,
)
from runtime.reward_texts import OwnIds
from runtime.text import Text
from runtime.whole_reply import WholeReply
from search.engine import RewardMissing, Trajectory
from tests.runtime.outcome_model import FORMAT as OUTCOME
from tests.runtime.outcome_model import make_outcome_model
from tests.runtime.tiny_models import make_tokenizer

SHEPHERD = REWARD_FORMATS["math-shepherd"]


def words(
    folder: Path, *specials: str, begin: str | None = None, template: str = "", context: int = 64
) -> Text:
    """The Text of a new checkpoint: a tokenizer, and a config with its context."""
    tokenizer = make_tokenizer(specials, template)
    tokenizer.bos_token = begin
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return Text(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The policy's tokenizer, which the reward model shares."""
    return words(tmp_path_factory.mktemp("words"))


def path(steps: tuple[tuple[int, ...], ...], texts: tuple[str, ...] = ()) -> Trajectory:
    """A trajectory of these steps."""
    return Trajectory(1, steps, texts or ("",) * len(steps))


def test_the_tag_stands_after_every_step_and_stays(text: Text) -> None:
    """A path is the prompt, then each step's ids and the tag, unless the step ends with it already.

    Models that were taught with the tag as their delimiter (Llemma, Math-Shepherd's) write it.
    """
    reader = Reader.of(SHEPHERD, text, text)
    tag = text.token("ки")
    assert tag is not None
    assert text.pieces[tag] == "ки".encode()
    assert reader.paths.path((1, 2), "", path(((3, 4), (5,))), {}) == (1, 2, 3, 4, tag, 5, tag)
    assert reader.paths.path((1, 2), "", path(((3, tag), (5,))), {}) == (1, 2, 3, tag, 5, tag)
    assert overhead_of(reader.paths) == (0, 1)


@pytest.mark.promise(
    "A reward model with its own tokenizer gets its own ids of each step, encoded once."
)
def test_another_tokenizer_reads_the_texts(text: Text, tmp_path: Path) -> None:
    """Its ids are encoded from question and texts, each step once, with its own tag."""
    prm = words(tmp_path, "<extra_0>")
    reader = Reader.of(SHEPHERD, prm, text)
    assert isinstance(Reader.of(SHEPHERD, text, text).paths, PolicyIds)
    assert isinstance(reader.paths, OwnIds)
    spelt: dict = {}
    texts = ("Step 1: add ки\n\n", "Step 2: stop.")
    ids = reader.paths.path((1, 2), "Why?", path(((3,), (4,)), texts), spelt)
    assert list(ids) == [
        *prm.encode("Why?"),
        *prm.encode(" Step 1: add"),
        prm.token("ки"),
        *prm.encode("\nStep 2: stop."),
        prm.token("ки"),
    ]
    before = dict(spelt)
    longer = path(((3,), (4,), (5,)), (*texts, "Step 3"))
    assert reader.paths.path((1, 2), "Why?", longer, spelt)[: len(ids)] == ids
    assert len(spelt) == len(before) + 1


def test_a_text_begins_with_the_begin_token_where_the_format_says_so(
    text: Text, tmp_path: Path
) -> None:
    """``{bos}`` becomes the begin token's id, or nothing if the tokenizer has none."""
    prm = words(tmp_path, "<s>", begin="<s>")
    begin, question_ids = prm.token("<s>"), prm.encode("Why?\n")
    assert begin is not None
    form = REWARD_FORMATS["skywork"]
    assert OwnIds(form, prm, None).opening((1, 2), "Why?", {}) == (begin, *question_ids)
    assert OwnIds(form, text, None).opening((1, 2), "Why?", {}) == tuple(question_ids)
    bare = form.model_copy(update={"opening": "{question}\n"})
    assert OwnIds(bare, prm, None).opening((1, 2), "Why?", {}) == tuple(question_ids)


def test_a_format_without_a_tag_spells_the_steps_alone(text: Text, tmp_path: Path) -> None:
    """Without a tag the steps' texts follow each other; equal texts count as separate steps."""
    prm = words(tmp_path, "<extra_0>")
    reader = Reader.of(REWARD_FORMATS["logit"], prm, text)
    ids = reader.paths.path((1, 2), "Why?", path(((3,), (4,)), ("So.", "So.")), {})
    assert list(ids) == prm.encode("Why?\n") + prm.encode("So.") + prm.encode("\n\nSo.")


def test_what_a_path_takes_beside_the_policys_tokens(text: Text) -> None:
    """The overhead is the opening less one token of the prompt, and for each step the text before
    it and its tag."""
    form = RewardFormat(name="own", reads="mean", opening="Q: {question}\n", later="\n\n")
    opening, between = text.encode("Q: \n"), text.encode("\n\n")
    assert (len(opening), len(between)) == (4, 1)
    assert overhead_of(OwnIds(form, text, None)) == (4 - 1, 1)
    assert overhead_of(OwnIds(form, text, 7)) == (4 - 1, 1 + 1)
    assert overhead_of(PolicyIds(None)) == (0, 0)


def test_a_template_is_filled_once() -> None:
    """Placeholders are filled once; inserted text and unknown placeholders are left alone."""
    words = {"question": "{steps}?", "steps": "So."}
    assert fill_template("{question} {steps} {else}", words) == "{steps}? So. {else}"


def test_a_dialogue_in_a_template_of_two_roles(text: Text, tmp_path: Path) -> None:
    """A template like Llama 2's refuses a third role. The ids built turn by turn equal those of the
    whole conversation."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "{{ ' ' + m['content'].strip() + '<|end|>' }}{% else %}"
        "{{ raise_exception('users and assistants alone') }}{% endif %}{% endfor %}"
    )
    prm = words(tmp_path, template=template)
    reader = Reader.of(REWARD_FORMATS["rlhflow"], prm, text)
    ids = reader.paths.path((1, 2), "Why?", path(((3,), (4,)), ("So.", "Then.")), {})
    whole = "[INST] Why? So. [/INST] +<|end|>[INST] Then. [/INST]"
    assert list(ids) == prm.encode(whole)


def test_rewards_by_hand() -> None:
    """softmax over the two verdicts: 1/2 where they tie, 1/(1+e^-1) one apart, others ignored.

    The mean's sigmoid: all logits count, an even vocabulary of one value gives that value's.
    """
    reading = Softmax(good=0, bad=1)
    assert reading.reward(torch.tensor([2.0, 2.0, 9.0])) == 0.5
    assert reading.reward(torch.tensor([2.0, 1.0, 9.0])) == pytest.approx(0.7310585786300049)
    assert reading.reward(torch.tensor([0.0, 5000.0, 0.0])) == pytest.approx(0.0)
    assert reading.reward(torch.tensor([5000.0, 0.0, 0.0])) == 1.0
    assert Mean().reward(torch.tensor([1.0, 1.0, 1.0])) == pytest.approx(0.7310585786300049)
    assert Mean().reward(torch.tensor([3.0, -1.0, -2.0])) == 0.5


def test_heads_by_hand() -> None:
    """Of (1, -2) the first layer makes (1 + 2, -2 - 2 + 1), ReLU (3, 0) of it and the second 2 * 3
    - 5 = 1, whose sigmoid is the value. Three outputs 0, ln 3, ln 4 are shared as 1, 3, 4 of 8."""
    row = torch.tensor([1.0, -2.0])
    first = (np.array([[1.0, -1.0], [-2.0, 1.0]]), np.array([0.0, 1.0]))
    scalar, classes = REWARD_FORMATS["skywork"], REWARD_FORMATS["qwen2.5-math-prm"]
    value = Head((first, (np.array([[2.0, 7.0]]), np.array([-5.0]))), scalar)
    assert value.reward(row) == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-12)
    over = Head(value.layers, scalar.model_copy(update={"scale": 4.0}))
    assert over.reward(row) == pytest.approx(1 / (1 + math.exp(-1 / 4)), abs=1e-12)
    shares = (np.zeros((3, 2)), np.log([1.0, 3.0, 4.0]))
    for label, share in enumerate((1 / 8, 3 / 8, 4 / 8)):
        form = classes.model_copy(update={"label": label})
        assert Head((shares,), form).reward(row) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "label", "outputs", "misfit"),
    [
        ("skywork", 0, 1, None),
        ("skywork", 0, 2, "2 outputs; exactly one is needed"),
        ("qwen2.5-math-prm", 0, 1, "1 outputs; at least 2 are needed"),
        ("qwen2.5-math-prm", 1, 2, None),
        ("qwen2.5-math-prm", 1, 3, None),
        ("qwen2.5-math-prm", 2, 2, "2 outputs; at least 3 are needed"),
    ],
)
def test_how_many_outputs_a_head_has(
    name: str, label: int, outputs: int, misfit: str | None
) -> None:
    """A value head has one output; classes have at least two, including the one that is read."""
    form = REWARD_FORMATS[name].model_copy(update={"label": label})
    assert outputs_misfit(outputs, form) == misfit


def test_an_outcome_model_reads_whole_replies_with_a_scaled_head(tmp_path: Path) -> None:
    """An outcome format's spelling and its ``scale`` reach the paths and the head."""
    text = Text(make_outcome_model(tmp_path / "outcome"))
    form = REWARD_FORMATS[OUTCOME].model_copy(update={"scale": 8.0})
    assert paths_of(form, text, text) == WholeReply(form, text)
    assert Head.of(form, text).form.scale == 8.0


@pytest.mark.parametrize("part", ["tag", "good", "bad"])
def test_a_verdict_that_is_not_one_token_is_refused_by_name(text: Text, part: str) -> None:
    """The refusal comes at start, and names format, part and text."""
    broken = SHEPHERD.model_copy(update={part: "not one token"})
    with pytest.raises(RewardMissing, match=f"'math-shepherd': {part} 'not one token'"):
        Reader.of(broken, text, text)


def test_a_token_the_model_does_not_have_is_refused(text: Text, tmp_path: Path) -> None:
    """A tag beyond the model's vocabulary is refused, even if the tokenizer knows it."""
    prm = words(tmp_path, "<extra_0>")
    config = {"max_position_embeddings": 64, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = Text(tmp_path)
    message = r"'math-shepherd': tag 'ки' is token \d+; .* ids from 0 to 199"
    with pytest.raises(RewardMissing, match=message):
        Reader.of(SHEPHERD, small, prm)


def test_verdicts_may_be_ids(text: Text) -> None:
    """Verdicts may be given as ids, as on some model cards; unknown ids are refused."""
    form = REWARD_FORMATS["logit"].model_copy(update={"good": 0, "bad": 7})
    assert Reader.of(form, text, text).reading == Softmax(good=0, bad=7)
    for bad in (100_000, text.model_vocab):
        with pytest.raises(RewardMissing, match=rf"'logit': bad {bad} is token {bad}"):
            Reader.of(form.model_copy(update={"bad": bad}), text, text)


def test_a_context_without_room_for_a_step_is_refused(text: Text, tmp_path: Path) -> None:
    """The format's own words count: a system message can fill a short context."""
    prm = words(tmp_path, "<extra_0>", context=40)
    form = REWARD_FORMATS["qwen2.5-math-prm"].model_copy(update={"reads": "mean"})
    with pytest.raises(ValueError, match=r"'qwen2.5-math-prm': one empty step takes \d+ tokens"):
        Reader.of(form, prm, text)
    for context, fits in ((3, False), (4, True)):  # needed: a prompt token, a step token, the tag
        short = words(tmp_path, context=context)
        with nullcontext() if fits else pytest.raises(ValueError, match="one empty step takes 3"):
            Reader.of(SHEPHERD, short, short)


def test_a_template_that_cannot_be_cut_is_refused(text: Text, tmp_path: Path) -> None:
    """A template that cannot be rendered turn by turn is refused for a dialogue."""
    backwards = "{% for m in messages | reverse %}{{ m.content }};{% endfor %}"
    prm = words(tmp_path, template=backwards)
    with pytest.raises(ValueError, match=r"'rlhflow': the chat template of .* does not put '\+'"):
        Reader.of(REWARD_FORMATS["rlhflow"], prm, text)


def test_a_template_whose_turns_grow_together_is_refused(text: Text, tmp_path: Path) -> None:
    """A template is refused if a turn's last letter and the answer after it form one token."""
    template = "{% for m in messages %}{{ m.content }}{{ ' t' if m.role == 'user' }}{% endfor %}"
    prm = words(tmp_path, template=template)
    assert len(prm.encode(" the")) == 1
    form = REWARD_FORMATS["rlhflow"].model_copy(update={"good": "he"})
    with pytest.raises(ValueError, match="does not put 'he' right after the assistant's opening"):
        Reader.of(form, prm, text)


def test_unknown_formats_are_refused_with_what_there_is() -> None:
    """The error names the field, the value and the formats."""
    with pytest.raises(ValueError, match="reward_format: 'oracle'; one of math-shepherd, "):
        reward_format("oracle")
    assert local_reward_format("rlhflow") is reward_format("rlhflow")
    assert not reward_format("none").needs_model
    assert not reward_format("generative").needs_model
    assert all(name == form.name for name, form in REWARD_FORMATS.items())


def test_a_file_extends_a_format(tmp_path: Path) -> None:
    """Missing fields are inherited, and the name is the file's unless given."""
    file = tmp_path / "yes-no.json"
    file.write_text(json.dumps({"extends": "logit", "good": " Yes", "bad": " No"}))
    form = reward_format(str(file))
    assert form == REWARD_FORMATS["logit"].model_copy(
        update={"name": "yes-no", "good": " Yes", "bad": " No"}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "holds no object"),
        ("{", "cannot be read"),
        ('{"extends": "oracle"}', "extends 'oracle'; math-shepherd, "),
        ('{"extends": "logit", "goood": "+"}', "goood: Extra inputs are not permitted"),
        ('{"extends": "logit", "bad": ""}', "bad: empty; reads 'softmax' needs it"),
        ('{"reads": "value"}', ": format: head: empty; reads 'value' needs it"),
        ('{"reads": "value", "head": [1]}', r": head\.0: Input should be a valid string"),
        ('{"extends": "rlhflow", "reads": "mean", "good": ""}', "good: ''; spells 'dialogue'"),
        ('{"extends": "generative", "votes": 0}', "votes: Input should be greater than or equal"),
        ('{"extends": "generative", "template": "{question}"}', "template: without {steps}"),
        ('{"extends": "generative", "pattern": "N"}', "a group for the number is needed"),
        ('{"extends": "generative", "pattern": "("}', "pattern: '\\('; missing \\)"),
        ('{"extends": "generative", "lowest": 10}', "lowest: 10; less than highest, 10"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    """One line naming file, field and what is needed."""
    file = tmp_path / "own.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"reward_format: .*own.json.*{message}"):
        reward_format(str(file))


def test_a_file_that_is_not_there_is_named() -> None:
    """A format file that does not exist is named."""
    with pytest.raises(ValueError, match=r"reward_format: 'nowhere\.json' cannot be read"):
        reward_format("nowhere.json")


def test_a_format_is_only_data() -> None:
    """A format survives a round trip through JSON, as on its way to the engine's process."""
    for form in REWARD_FORMATS.values():
        assert RewardFormat.model_validate_json(form.model_dump_json()) == form
