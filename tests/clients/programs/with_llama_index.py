"""LlamaIndex's OpenAILike: chat, stream, complete, and a search. Prints JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, question = sys.argv[1:]
common = {"api_base": url, "api_key": "any", "model": "sprig", "is_chat_model": True}
seeded = OpenAILike(**common, max_tokens=24, additional_kwargs={"seed": 3}, temperature=1.0)
search = {"extra_body": {"search": {"policy": "rebase", "width": 2, "seed": 11}}}
searching = OpenAILike(**common, additional_kwargs=search)
messages = [ChatMessage(role="user", content=question)]
print(
    json.dumps(
        {
            "whole": seeded.chat(messages).message.content,
            "streamed": "".join(piece.delta or "" for piece in seeded.stream_chat(messages)),
            "complete": seeded.complete(question).text,
            "search": searching.chat(messages).message.content,
        }
    )
)
