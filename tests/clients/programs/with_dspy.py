"""dspy: its language model: plain, searched, and over the Responses API. Prints JSON."""

import json
import sys

import dspy

url, question = sys.argv[1:]
common = {"api_base": url, "api_key": "any", "cache": False}
plain = dspy.LM("openai/sprig", **common, max_tokens=24, temperature=1.0, seed=3)
search = {"policy": "rebase", "width": 2, "seed": 11}
searching = dspy.LM("openai/sprig", **common, extra_body={"search": search})
responding = dspy.LM("openai/sprig", **common, model_type="responses", max_tokens=24)


def text(choices) -> str:
    """Return the text of the first choice."""
    return choices[0]["text"] if isinstance(choices[0], dict) else choices[0]


print(
    json.dumps(
        {
            "whole": text(plain(question)),
            "search": text(searching(question)),
            "response": text(responding(question)),
        }
    )
)
