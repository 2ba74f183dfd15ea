"""its-hub's own self-consistency over plain replies and over searches. Prints JSON."""

import json
import sys

from its_hub import OpenAICompatibleLanguageModel, SelfConsistency

url, question = sys.argv[1:]


def vote(model: str) -> str:
    """Return the reply that its self-consistency picks of four."""
    client = OpenAICompatibleLanguageModel(
        url, "any", model, max_completion_tokens=120, temperature=1.0
    )
    reply = SelfConsistency().infer(client, question, budget=4)
    return reply["content"] if isinstance(reply, dict) else reply


print(json.dumps({"reply": vote("sprig"), "searched": vote("sprig:rebase-4")}))
