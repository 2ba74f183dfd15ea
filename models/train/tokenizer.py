"""Train the tokenizer: byte-level BPE over the corpus, numbers and step breaks kept whole.

`python -m models.train.tokenizer` writes tokenizer files into each model folder.
"""

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.bundled import SPRIG_FOLDER
from models.train.corpus import MIXTURE, SYSTEM_MESSAGES, example

MODEL_FOLDERS = ("policy", "prm", "draft")
VOCAB_SIZE = 1024
SEED = 11
EXAMPLES = 12_000
NUMBERS = range(200)
NUMBER_WEIGHT = 400

PAD, USER, ASSISTANT, END, TAG = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "ки"
SPECIAL = (PAD, USER, ASSISTANT, END, TAG)
ROUND_TO = 32

# Set phrases, numbers, words and signs are cut apart here and never merge across; single signs
# stay single so that `+` and `-` have ids of their own.
PIECES = r"\n\n|The answer is|The number is| \(left:| ?\d+| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def texts() -> Iterator[str]:
    """The corpus, and every number often enough to become one token with and without a space."""
    rng = random.Random(SEED)
    for _ in range(EXAMPLES):
        dialogue = example(rng, MIXTURE)
        yield f"{dialogue.user}\n\n{dialogue.reply}"
    for _ in range(NUMBER_WEIGHT):
        yield "\n\n".join(f"{number} {number}" for number in NUMBERS)
        yield "\n\n".join(SYSTEM_MESSAGES)


def train() -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template set."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    spare = -tokenizer.get_vocab_size() % ROUND_TO
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(spare)])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, TAG],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATE
    return fast_tokenizer


def main() -> None:
    """Train and write."""
    tokenizer = train()
    for folder in MODEL_FOLDERS:
        tokenizer.save_pretrained(SPRIG_FOLDER / folder)
    print(f"{len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
