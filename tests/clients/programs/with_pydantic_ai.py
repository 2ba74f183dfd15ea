"""pydantic-ai: an agent's run, stream and second turn, a search with its thoughts, and typed
output by tools and by a schema. Prints JSON."""

import asyncio
import json
import sys

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    """An answer, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    first: int
    last: bool


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
    second = await agent.run(question, message_history=whole.all_messages(), model_settings=short)
    async with agent.run_stream(question, model_settings={"extra_body": search}) as running:
        search_output = await running.get_output()
        kinds = [part.part_kind for part in running.all_messages()[-1].parts]
    response = await responses.run(
        question, model_settings={"max_tokens": 24, "extra_body": {"seed": 3}}
    )
    typed = {}
    for wrapper in (ToolOutput, NativeOutput):
        reply = await agent.run(question, output_type=wrapper(Answer), model_settings={"seed": 3})
        typed[wrapper.__name__] = reply.output.model_dump()
    print(
        json.dumps(
            {
                "whole": whole.output,
                "streamed": streamed,
                "second_turn": second.usage.input_tokens > whole.usage.input_tokens,
                "search": search_output,
                "parts": kinds,
                "response": response.output,
                "typed": typed,
            }
        )
    )


asyncio.run(main())
