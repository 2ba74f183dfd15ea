"""Every policy over real vLLM servers on the CPU, by both routes; ``make vllm-env`` makes their
environment.

The bundled models solve the bundled tasks there. A tiny Qwen2.5-Math-PRM, whose class is vLLM's
own, gives the rewards that transformers computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from loadtest.on_vllm import VLLM
from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from runtime.servers.routing import LEAST_TOKENS
from runtime.text import Text
from search.policies.policy import Scores
from search.policies.registry import POLICIES
from search.spec import PolicyName, SearchSpec
from tests.runtime.openai.vllm_server import serving
from tests.runtime.published_models import qwen_prm_for_vllm
from tests.runtime.test_reward_models import QUESTION, STEPS, qwen
from tests.server.test_process import Server, metric

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

TASK = TASKS["game24"]
QUESTIONS = (
    "Use 1 2 11 11 to make 24.",
    "Use 3 4 12 13 to make 24.",
    "Use 9 9 12 13 to make 24.",
)
"""Questions of the dev split; a plain sample solves each at least every third time."""
WIDTHS = {"self_consistency": 64}
"""Other policies have 16; without rewards a majority of derivations needs more of them."""
PATIENT = {"probe_seconds": "60", "connect_seconds": "60"}
"""Timeouts for servers that share their cores."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The policy's server, which reports cached tokens."""
    assert VLLM.is_file(), "make vllm-env first"
    log = tmp_path_factory.mktemp("logs") / "policy"
    with serving(SPRIG_FOLDER / "policy", log, ["--enable-prompt-tokens-details"]) as url:
        yield url


@pytest.fixture(scope="module")
def bundled(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Hedgerow over both bundled models."""
    log = tmp_path_factory.mktemp("logs") / "reward"
    with serving(SPRIG_FOLDER / "prm", log) as reward:
        server = Server(engine="openai", policy_urls=policy, reward_urls=reward, **PATIENT)
        yield server
        server.stop()


@pytest.fixture(scope="module")
def prm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Math-PRM."""
    return qwen_prm_for_vllm(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def published(policy: str, prm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Hedgerow over the bundled policy and the tiny Qwen2.5-Math-PRM, known by its name."""
    log, tag = tmp_path_factory.mktemp("logs") / "prm", Text(prm).token("<extra_0>")
    pooling = ["--runner", "pooling", "--pooler-config", f'{{"step_tag_id": {tag}}}']
    with serving(prm, log, pooling) as reward:
        server = Server(
            engine="openai",
            policy_urls=policy,
            reward_urls=reward,
            reward_model=str(prm),
            **PATIENT,
        )
        yield server
        server.stop()


def run_search(server: Server, question: str, **search: Any) -> dict[str, Any]:
    """Return the document of ``/v1/search``."""
    width = WIDTHS.get(search["policy"], 16)
    body = {"question": question, "search": {"width": width, "seed": 0, **search}}
    answer = httpx2.post(f"{server.url}/v1/search", json=body, timeout=600)
    return answer.raise_for_status().json()


def total(http: httpx2.Client, tokens: str) -> float:
    """Return the counter of these tokens, over all searches."""
    return metric(http, f"hedgerow_{tokens}_tokens_total", served="sprig")


@pytest.mark.promise(
    "Every policy on vLLM answers at least two thirds of the questions right, over `/v1/search` "
    "and chat together."
)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_right(bundled: Server, name: str) -> None:
    """Each question by both routes; one in three may be missed, as narrow searches miss some."""
    client = OpenAI(base_url=f"{bundled.url}/v1", api_key="any", max_retries=0, timeout=600)
    right = 0
    for question in QUESTIONS:
        document = run_search(bundled, question, policy=name)
        completion = client.chat.completions.create(
            model="sprig",
            messages=[{"role": "user", "content": question}],
            extra_body={"search": {"policy": name, "width": WIDTHS.get(name, 16), "seed": 1}},
        )
        text = completion.choices[0].message.content or ""
        right += TASK.check(question, document["text"]).correct + TASK.check(question, text).correct
    assert right >= len(QUESTIONS) * 4 // 3


def test_a_plain_reply_is_drawn_by_vllms_parameters(bundled: Server) -> None:
    """At temperature 0 the reply is the likeliest one; penalties on the output, which vLLM would
    count anew in each request, are refused by name."""
    client = OpenAI(base_url=f"{bundled.url}/v1", api_key="any", max_retries=0, timeout=600)

    def reply(temperature: float, **fields: Any) -> str:
        completion = client.chat.completions.create(
            model="sprig",
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            temperature=temperature,
            seed=1,
            max_tokens=60,
            extra_body=fields,
        )
        return completion.choices[0].message.content or ""

    likeliest = reply(0.0)
    assert likeliest
    assert reply(2.0, top_k=1) == reply(2.0, min_p=1.0) == likeliest
    assert reply(0.0, repetition_penalty=2.0) != likeliest
    for name in ("presence_penalty", "frequency_penalty"):
        with pytest.raises(BadRequestError, match=f"{name}: not supported"):
            reply(0.0, **{name: 1.0})


def test_what_was_read_before_is_cached(bundled: Server) -> None:
    """In whole blocks, nothing that a search has read is computed again."""
    with httpx2.Client(base_url=bundled.url, timeout=60) as http:
        before = total(http, "prefix_expected")
        document = run_search(bundled, QUESTIONS[0], policy="rebase")
        assert total(http, "prefix_expected") > before
    costs = document["stats"]["engine"]
    assert costs["cached_tokens"] >= costs["expected_tokens"] > 0
    assert costs["rehydrated_tokens"] == 0


def test_what_is_not_cached_is_counted_and_said_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The server caches nothing, behind a route that is declared to keep trees together."""
    flags = ["--enable-prompt-tokens-details", "--no-enable-prefix-caching"]
    with serving(SPRIG_FOLDER / "policy", tmp_path / "log", flags) as url:
        server = Server(
            engine="openai",
            policy_urls=url,
            reward_model="none",
            routing="header:x-tree",
            **PATIENT,
        )
        try:
            for seed in range(6):
                document = run_search(server, QUESTIONS[0], policy="rebase", seed=seed)
                costs = document["stats"]["engine"]
                assert costs["cached_tokens"] == 0
                assert costs["rehydrated_tokens"] == costs["expected_tokens"] > 0
            with httpx2.Client(base_url=server.url, timeout=60) as http:
                expected, recomputed = total(http, "prefix_expected"), total(http, "rehydrated")
        finally:
            server.stop()
    assert recomputed == expected > LEAST_TOKENS
    assert "".join(server.log).count("does it heed the header x-tree?") == 1


@pytest.mark.promise(
    "A Qwen2.5-Math-PRM in vLLM's own class gives the rewards of transformers to 1e-3."
)
def test_rewards_are_those_of_transformers(published: Server, prm: Path) -> None:
    """``/v1/score`` gives the rewards of each step."""
    body = {"question": QUESTION, "steps": list(STEPS)}
    answer = httpx2.post(f"{published.url}/v1/score", json=body, timeout=600)
    (item,) = answer.raise_for_status().json()["data"]
    assert item["rewards"] == pytest.approx(qwen(prm), abs=1e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_searches_end_with_such_rewards(published: Server, name: PolicyName) -> None:
    """The rewards are random; every step that the policy needs scored has one."""
    document = run_search(published, QUESTIONS[0], policy=name, width=4)
    rewards = [node["reward"] for node in document["tree"]["nodes"][1:]]
    assert document["stop_reason"] in ("answered", "width_spent", "depth")
    scores = POLICIES[name](SearchSpec(policy=name)).scores
    assert (scores is Scores.ALL) <= all(reward is not None for reward in rewards)
    assert (scores is Scores.NONE) == all(reward is None for reward in rewards)
