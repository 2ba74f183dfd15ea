"""The tasks that the bundled models were trained on, by name."""

from models.tasks.blocksworld import Blocksworld
from models.tasks.countdown import Countdown
from models.tasks.game24 import Game24
from models.tasks.task import Task
from models.tasks.wordproblem import WordProblem

TASKS: dict[str, Task] = {
    "game24": Game24(),
    "countdown": Countdown(),
    "blocksworld": Blocksworld(),
    "wordproblem": WordProblem(),
}
