"""The policy's drills with wrong words, which teach the reward model to compare.

In a reply to be judged a wrong word is rare and the question far away; here every third word may be
wrong, and the right one stands earlier in the text or follows from the two words before it.
"""

import random
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from models.tasks.story import NAMES
from models.train.batches import IGNORED, Row, prompt_ids
from models.train.careless import OFF_BY
from models.train.drills import echo, repeat, retell, sums

KINDS = (repeat, retell, sums, retell, echo, sums)
RATES = (0.05, 0.1, 0.2, 0.3)
NEARBY = 0.7
"""How often the wrong word is another of the same reply."""
OFF_SHARE = 0.6
"""How often a sum's wrong result is off by little."""
SOUND_LEARNT = 0.2
"""The share of the never changed words that is learnt."""


@lru_cache(1)
def word_classes(tokenizer: PreTrainedTokenizerBase) -> dict[int, list[int]]:
    """For the ids of numbers, names and `more` or `fewer`: all ids of that class."""
    classes = ([f" {n}" for n in range(200)], [f" {name}" for name in NAMES], [" more", " fewer"])
    ids = [[tokenizer.encode(word)[0] for word in words] for words in classes]
    return {token: class_ids for class_ids in ids for token in class_ids}


def slipped_drill(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Row:
    """A drill's question and reply with some wrong words, labelled 1 there and 0 elsewhere."""
    drill = rng.choice(KINDS)
    question, (reply,) = drill(rng)
    prompt, ids = prompt_ids(tokenizer, question), tokenizer.encode(reply)
    (equals,) = tokenizer.encode(" =")
    classes = word_classes(tokenizer)
    numbers = classes[tokenizer.encode(" 0")[0]]
    open_to_slips = {
        i
        for i, token in enumerate(ids)
        if token in classes
        and (drill is not echo or classes[token] is numbers)
        and (drill is not sums or ids[i - 1] == equals)
    }
    rate = rng.choice(RATES)
    labels = [
        0 if i in open_to_slips or rng.random() < SOUND_LEARNT else IGNORED for i in range(len(ids))
    ]
    for i in sorted(open_to_slips):
        if rng.random() < rate:
            off = drill is sums and rng.random() < OFF_SHARE
            wrong = _off(numbers, ids[i], rng) if off else _another(classes[ids[i]], ids, rng)
            labels[i] = int(wrong != ids[i])
            ids[i] = wrong
    return Row(drill.__name__, prompt + ids, [IGNORED] * len(prompt) + labels)


def _another(of_class: list[int], nearby: list[int], rng: random.Random) -> int:
    near_tokens = [token for token in nearby if token in of_class]
    return rng.choice(near_tokens if rng.random() < NEARBY else of_class)


def _off(numbers: list[int], right: int, rng: random.Random) -> int:
    return numbers[(numbers.index(right) + rng.choice(OFF_BY)) % len(numbers)]
