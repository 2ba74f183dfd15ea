"""Where in the wording of a word problem's step the fault stands.

A verdict on a whole step says little about why: the reward model learns to compare a step with
its question far sooner when it also hears, word by word, whether the step may still be right.
"""

from models.tasks import story as english
from models.tasks.task import ANSWER_PREFIX


def right_letters(question: str, steps: list[str]) -> int:
    """How many letters of the last of `steps` begin some right step, those before it being right.

    Raises ValueError if `question` is no word problem.
    """
    story = english.parse_story(question)
    if story is None:
        raise ValueError(f"not a word problem: {question!r}")
    known = english.known_after(story, steps[:-1])
    right = [text for text, _, _ in english.conclusions(story, known)]
    if story.who in known:
        right.append(f"{ANSWER_PREFIX}{known[story.who]}.")
    return max((_shared(steps[-1], text) for text in right), default=0)


def _shared(first: str, second: str) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
