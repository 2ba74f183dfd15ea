"""inspect-ai: an evaluation of two questions by plain replies and by a search. Prints JSON."""

import json
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

url, question = sys.argv[1:]
samples = [Sample(input=question, target="The answer is"), Sample(input=question, target="24")]
task = Task(dataset=samples, solver=generate(), scorer=includes())


def accuracy(model: str, **config) -> tuple[str, float, int]:
    """How an evaluation ended, what it came to, and the tokens that were drawn for it."""
    served = get_model(
        model, base_url=url, api_key="any", config=GenerateConfig(seed=3, **config), memoize=False
    )
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(task, model=served, log_dir=folder, display="none")
    drawn = sum(usage.output_tokens for usage in log.stats.model_usage.values())
    return log.status, log.results.scores[0].metrics["accuracy"].value, drawn


print(
    json.dumps(
        {
            "plain": accuracy("openai-api/hedgerow/sprig", max_tokens=24),
            "search": accuracy("openai-api/hedgerow/sprig:rebase-4"),
        }
    )
)
