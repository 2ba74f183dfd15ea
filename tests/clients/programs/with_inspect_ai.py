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
    """Run an evaluation; return its status, its accuracy and the number of generated tokens."""
    served_model = get_model(
        model, base_url=url, api_key="any", config=GenerateConfig(seed=3, **config), memoize=False
    )
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(task, model=served_model, log_dir=folder, display="none")
    tokens = sum(usage.output_tokens for usage in log.stats.model_usage.values())
    return log.status, log.results.scores[0].metrics["accuracy"].value, tokens


print(
    json.dumps(
        {
            "plain": accuracy("openai-api/hedgerow/sprig", max_tokens=24),
            "search": accuracy("openai-api/hedgerow/sprig:rebase-4"),
        }
    )
)
