"""its-hub's own self-consistency over plain replies and over searches. Prints JSON."""

import json
import sys

from its_hub import OpenAICompatibleLanguageModel, SelfConsistency

url, question = sys.argv[1:]


def vote(model: str) -> str:
    """The reply that its vote picks of four."""
    client = OpenAICompatibleLanguageModel(
        url, "any", model, max_completion_tokens=120, temperature=1.0
    )
    found = SelfConsistency().infer(client, question, budget=4)
    return found["content"] if isinstance(found, dict) else found


print(json.dumps({"reply": vote("sprig"), "searched": vote("sprig:rebase-4")}))
