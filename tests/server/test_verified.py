"""A server whose rewards a verifier takes part in: what clients and operators see of it."""

from __future__ import annotations

import httpx2
import pytest
from openai import AsyncOpenAI

from runtime.verified_engine import VerifiedEngine
from runtime.verifiers.verifier import VerifierOptions, fingerprint_of
from search.engine import VerifierFailed
from server.reward_settings import verified_alone
from server.settings import SettingsError, load_settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import chat, question, refusal

SEARCH = {"policy": "rebase", "width": 4, "seed": 1}


class Judging:
    """A verifier that fails for one question."""

    pure = False
    fingerprint = fingerprint_of("judging")
    closed = False

    async def verify(self, batch: list[dict[str, object]]) -> list[float]:
        """Return a half for each trajectory."""
        if batch[0]["question"] == "fail":
            raise VerifierFailed("the verifier raised LookupError")
        return [0.5 for _ in batch]

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


@pytest.fixture
def engine() -> VerifiedEngine:
    """The scripted engine with the verifier above."""
    return VerifiedEngine(ScriptedEngine(likelihood=True), Judging(), alone=True)


@pytest.mark.promise(
    "A request whose verifier fails gets an error with a code of its own and is counted; other "
    "requests are answered as before."
)
async def test_one_searchs_failure_is_its_own(http: httpx2.AsyncClient) -> None:
    """It has its own error code and is counted; other requests are answered as before."""
    body = {"model": "sprig", "search": SEARCH}
    first = await http.post("/v1/chat/completions", json=body | {"messages": question("well")})
    failure = await http.post("/v1/chat/completions", json=body | {"messages": question("fail")})
    second = await http.post("/v1/chat/completions", json=body | {"messages": question("well")})
    assert (failure.status_code, failure.json()["error"]["code"]) == (500, "verifier_failed")
    assert failure.json()["error"]["message"] == "the verifier raised LookupError"
    assert failure.headers["x-should-retry"] == "false"
    assert second.json()["search"]["tree_digest"] == first.json()["search"]["tree_digest"]
    metrics = (await http.get("/metrics")).text
    assert 'hedgerow_verifier_failures_total{served="sprig"} 1.0' in metrics
    assert "hedgerow_verifier_calls_total" in metrics
    assert "hedgerow_verifier_seconds_total" in metrics


async def test_steps_that_a_client_has_are_its_to_judge_too(http: httpx2.AsyncClient) -> None:
    """The verifier alone judges them without a reward model; its failure is the request's error."""
    body = {"question": "well", "steps": ["a", "b"]}
    response = (await http.post("/v1/score", json=body)).raise_for_status().json()
    assert response["data"][0]["rewards"] == [0.5, 0.5]
    assert response["reproducible"] == "no"
    error = await refusal(http, "/v1/score", body | {"question": "fail"}, 500)
    assert error["code"] == "verifier_failed"


@pytest.mark.promise(
    "Replies with an impure verifier say that they are not reproducible, and have the verifier's "
    "fingerprint."
)
async def test_replies_say_so(openai: AsyncOpenAI) -> None:
    """They have the verifier's fingerprint, and ``reproducible`` is "no"."""
    reply = await chat(openai, "well", search=SEARCH)
    assert reply.system_fingerprint is not None
    assert reply.system_fingerprint.endswith(f"scripted-1/{Judging.fingerprint}")
    assert reply.model_dump()["search"]["reproducible"] == "no"


async def test_no_request_names_one(http: httpx2.AsyncClient) -> None:
    """Only the operator can set a verifier."""
    search = {"verifier": "os:system"}
    error = await refusal(http, "/v1/search", {"question": "?", "search": search})
    assert error["param"] == "search.verifier"


@pytest.mark.parametrize("name", ["os.system", "system", ":x", "a:", "ftp://x", "a b:c"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    """The error says what is allowed, before any start."""
    message = r"arithmetic, a Python module:function or an http\(s\) URL is needed"
    with pytest.raises(SettingsError, match=f"^HEDGEROW_VERIFIER = '{name}': {message}$"):
        load_settings({"HEDGEROW_VERIFIER": name})


def test_alone_where_there_is_no_reward_model() -> None:
    """Otherwise the verifier's reward is a factor."""
    environ = {"HEDGEROW_VERIFIER": "arithmetic"}
    assert not verified_alone(load_settings(environ))
    assert verified_alone(load_settings(environ | {"HEDGEROW_REWARD_MODEL": "none"}))
    generative = environ | {"HEDGEROW_REWARD_MODEL": "none", "HEDGEROW_REWARD_FORMAT": "generative"}
    assert not verified_alone(load_settings(generative))
    assert VerifierOptions("x", key="s3cret").key not in repr(VerifierOptions("x", key="s3cret"))
