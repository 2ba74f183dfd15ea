"""The tasks that the bundled models were trained on, by name."""

from models.tasks.blocksworld import Blocksworld
from models.tasks.countdown import COUNTDOWN
from models.tasks.game24 import GAME24
from models.tasks.task import Task
from models.tasks.wordproblem import WordProblem

TASKS: dict[str, Task] = {
    "game24": GAME24,
    "countdown": COUNTDOWN,
    "blocksworld": Blocksworld(),
    "wordproblem": WordProblem(),
}
