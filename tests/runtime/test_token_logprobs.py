"""Log-probabilities of what is sampled, against transformers' own forward on a bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from search.engine import Branch, LogitsParams, Sampling, Step
from search.tree import ROOT, node_seed
from tests.closing import closing

POLICY = "models/sprig/policy"
PLAIN = EngineOptions(policy=POLICY, kv_tokens=4000, batch_limit=64, dedup=False, strict=True)
DRAFTED = replace(PLAIN, dedup=True, draft="scheduled", draft_model="models/sprig/draft")
SAMPLING = Sampling(0.7, 0.9, stop=(), max_step_tokens=24, logprobs=3)


async def steps(options: EngineOptions, sampling: Sampling) -> tuple[list[Branch], list[Step]]:
    """Four siblings' branches and steps."""
    prompt = tuple(Text(POLICY).encode_chat([{"role": "user", "content": "Use 1 2 3 4."}]))
    sampling = replace(sampling, prompt_tokens=len(prompt))
    branches = [
        Branch(ROOT, i, prompt, node_seed(3, "step", (i,)), sampling.max_step_tokens, i + 1)
        for i in range(4)
    ]
    async with closing(await EmbeddedEngine.start(options)) as engine:
        return branches, await engine.expand("oak", branches, sampling)


@pytest.mark.promise(
    "Log-probabilities of tokens are those of transformers to 1e-4, at temperature 1, untruncated"
    " and without penalties."
)
@pytest.mark.parametrize("logits", [LogitsParams(), LogitsParams(5, frequency_penalty=0.5)])
async def test_they_are_the_models_own(logits: LogitsParams) -> None:
    """Log-probabilities are at temperature 1, untruncated and without penalties."""
    branches, sampled = await steps(PLAIN, replace(SAMPLING, logits=logits))
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    for branch, step in zip(branches, sampled, strict=True):
        with torch.no_grad():
            all_logits = model(torch.tensor([[*branch.tokens, *step.tokens]])).logits[0]
        expected = all_logits.double().log_softmax(-1)[len(branch.tokens) - 1 : -1]
        assert len(step.logprobs) == len(step.tokens)
        for token, entry, row in zip(step.tokens, step.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(3)
            assert [top_token for top_token, _ in entry.top] == top.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        mean = sum(entry.logprob for entry in step.logprobs) / len(step.tokens)
        assert step.logprob == pytest.approx(mean, abs=1e-12)


@pytest.mark.slow
async def test_drafts_and_sharing_change_none() -> None:
    """Drafts and sharing change no bit, and without ``logprobs`` steps have none."""
    _, plain = await steps(PLAIN, SAMPLING)
    _, drafted = await steps(DRAFTED, SAMPLING)
    assert plain == drafted
    _, unasked = await steps(DRAFTED, replace(SAMPLING, logprobs=None))
    assert [replace(step, logprobs=()) for step in plain] == unasked
