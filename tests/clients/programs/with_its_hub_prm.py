"""its-hub's beam search and particle filter with our reward model by HTTP. Prints JSON.

its-hub's own process reward model needs vLLM in its process; any other is a class like this one.
"""

import asyncio
import json
import sys

import requests
from its_hub import OpenAICompatibleLanguageModel
from its_hub.api import AbstractProcessRewardModel
from its_hub.core.algorithms.beam_search import BeamSearch
from its_hub.core.algorithms.particle_gibbs import ParticleFiltering
from its_hub.core.lms.step_generation import StepGeneration

url, question = sys.argv[1:]
calls = []


class HedgerowRewards(AbstractProcessRewardModel):
    """Returns one reward for each partial reply: that of its last step."""

    def score(self, prompt_or_messages, steps):
        """Score one reply, or several in one request."""
        body = {"model": "sprig", "text_1": str(prompt_or_messages), "text_2": steps}
        response = requests.post(f"{url}/score", json=body, timeout=300)
        response.raise_for_status()
        scores = [row["score"] for row in response.json()["data"]]
        calls.append(len(scores))
        return scores[0] if isinstance(steps, str) else scores

    async def ascore(self, prompt_or_messages, steps):
        """Run ``score`` in a thread."""
        return await asyncio.to_thread(self.score, prompt_or_messages, steps)


model = OpenAICompatibleLanguageModel(
    url, "any", "sprig", temperature=1.0, max_completion_tokens=40
)
steps = StepGeneration(max_steps=3, step_token="\n\n", stop_token="The answer is")
beam = BeamSearch(steps, HedgerowRewards(), beam_width=2).infer(
    model, question, budget=4, return_response_only=False
)
particles = ParticleFiltering(steps, HedgerowRewards()).infer(
    model, question, budget=3, return_response_only=False
)
print(
    json.dumps(
        {
            "beam": beam.scores,
            "beam_reply": beam.the_one["content"],
            "particles": len(particles.responses),
            "particle_reply": particles.the_one["content"],
            "calls": calls,
        }
    )
)
