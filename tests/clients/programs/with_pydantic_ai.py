"""pydantic-ai: an agent's run, stream and second turn, and a search with its thoughts. Prints
JSON."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, question = sys.argv[1:]
provider = OpenAIProvider(base_url=url, api_key="any")
agent = Agent(OpenAIChatModel("sprig", provider=provider))
responses = Agent(OpenAIResponsesModel("sprig", provider=provider))
short = {"seed": 3, "max_tokens": 24, "temperature": 1.0}
search = {"search": {"policy": "rebase", "width": 2, "seed": 11}, "include_reasoning": True}


async def main() -> None:
    whole = await agent.run(question, model_settings=short)
    async with agent.run_stream(question, model_settings=short) as running:
        streamed = [text async for text in running.stream_text()][-1]
    again = await agent.run(question, message_history=whole.all_messages(), model_settings=short)
    async with agent.run_stream(question, model_settings={"extra_body": search}) as running:
        found = await running.get_output()
        kinds = [part.part_kind for part in running.all_messages()[-1].parts]
    response = await responses.run(
        question, model_settings={"max_tokens": 24, "extra_body": {"seed": 3}}
    )
    print(
        json.dumps(
            {
                "whole": whole.output,
                "streamed": streamed,
                "second_turn": again.usage.input_tokens > whole.usage.input_tokens,
                "search": found,
                "parts": kinds,
                "response": response.output,
            }
        )
    )


asyncio.run(main())
