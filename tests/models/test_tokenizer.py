"""The tokenizer's properties that engines and reward formats rely on."""

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from models.tasks.task import STEP_BREAK


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SPRIG_FOLDER / "policy")


def test_all_models_share_it() -> None:
    files = [
        (SPRIG_FOLDER / name / "tokenizer.json").read_bytes() for name in ("policy", "prm", "draft")
    ]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("template", ["{}", " {}"])
def test_numbers_up_to_199_are_one_token(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    long = [n for n in range(200) if len(tokenizer.encode(template.format(n))) != 1]
    assert long == []


@pytest.mark.parametrize(
    "text", ["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "ки", "+", "-"]
)
def test_what_is_read_by_id_is_one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == 1
    assert tokenizer.decode(ids) == text


def test_the_step_break_is_one_token_and_merges_with_nothing(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    (step_break,) = tokenizer.encode(STEP_BREAK)
    for before in ("a", ")", "4", ".", " ", "é"):
        for after in ("1", "The answer is", " x", "("):
            ids = tokenizer.encode(f"{before}{STEP_BREAK}{after}")
            assert ids == [*tokenizer.encode(before), step_break, *tokenizer.encode(after)]
    breaking = [i for i in range(len(tokenizer)) if STEP_BREAK in tokenizer.decode([i])]
    assert breaking == [step_break]


@pytest.mark.parametrize("text", ["", " ", "Grüße, 漢字 🌱\t\r\n", "a\n\n\nb", "1234567", "ки" * 2])
def test_any_text_survives(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_steps_encode_alone_as_they_do_within_a_reply(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rng = random.Random(1)
    for task in TASKS.values():
        question = task.questions("dev", 1)[0]
        steps = task.solve(question, rng)
        reply_ids = tokenizer.encode(STEP_BREAK.join(steps))
        parts = [tokenizer.encode(step + STEP_BREAK) for step in steps[:-1]]
        assert reply_ids == [token for part in parts for token in part] + tokenizer.encode(
            steps[-1]
        )
        assert max(map(len, parts)) <= task.max_step_tokens


def test_the_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Go"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "Be brief.<|user|>Hi<|assistant|>Yes<|end|><|user|>Go<|assistant|>"
    text = tokenizer.apply_chat_template(messages[1:3], tokenize=False)
    assert text == "<|user|>Hi<|assistant|>Yes<|end|>"
