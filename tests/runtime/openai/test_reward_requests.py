"""Requests to reward servers, and the rewards read from their answers."""

from __future__ import annotations

import math

import pytest

from models.bundled import SPRIG_FOLDER
from runtime.openai.completion_server import parse_metrics
from runtime.openai.reward_requests import (
    PooledOutputs,
    VerdictLogprobs,
    reward_request,
    trial_path,
)
from runtime.openai.server_dialect import cached_tokens, token_ids, top_logprobs
from runtime.reward_format import REWARD_FORMATS
from runtime.reward_reader import Softmax
from runtime.servers.server_metrics import ServerMetrics
from runtime.text import Text
from search.engine import EngineError, RewardMissing

TEXT = Text(SPRIG_FOLDER / "prm")
FORM = REWARD_FORMATS["math-shepherd"]
QWEN = REWARD_FORMATS["qwen2.5-math-prm"]
SKYWORK = REWARD_FORMATS["skywork"]


def verdicts() -> VerdictLogprobs:
    request = reward_request(FORM, TEXT, Text(SPRIG_FOLDER / "policy"))
    assert isinstance(request, VerdictLogprobs)
    return request


def choice(index: int, logprobs: dict[str, float]) -> dict[str, object]:
    return {"index": index, "logprobs": {"top_logprobs": [logprobs]}}


def test_a_round_is_one_request() -> None:
    """All paths go as token ids; both verdicts' log-probabilities are requested by id, and both
    verdicts get the same logit bias."""
    query = verdicts()
    body = query.body([(1, 2), (1, 3)])
    assert body["prompt"] == [[1, 2], [1, 3]]
    assert body["logprob_token_ids"] == [query.softmax.good, query.softmax.bad]
    assert set(map(int, body["logit_bias"])) == {query.softmax.good, query.softmax.bad}
    assert len(set(body["logit_bias"].values())) == 1
    assert (body["max_tokens"], body["temperature"]) == (1, 0)


def test_verdicts_are_read_by_id_or_by_name() -> None:
    """P(good) is .75 against .25 for choices in any order, and beside likelier other tokens."""
    query = verdicts()
    good, bad = math.log(0.3), math.log(0.1)
    by_id = {f"token_id:{query.softmax.good}": good, f"token_id:{query.softmax.bad}": bad, "x": 0.6}
    by_name = {"+": bad, "-": good}
    answer = {"choices": [choice(1, by_name), choice(0, by_id)]}
    assert query.rewards(answer) == pytest.approx([0.75, 0.25])


def test_a_verdict_that_is_not_told() -> None:
    """A missing verdict's log-probability is an error rather than a guess."""
    query = verdicts()
    with pytest.raises(EngineError, match=f"no log-probability of verdict {query.softmax.bad}"):
        query.rewards({"choices": [choice(0, {f"token_id:{query.softmax.good}": -1.0})]})


def pooled(*items: object) -> dict[str, object]:
    return {"data": [{"index": at, "data": data} for at, data in enumerate(items)]}


def test_the_last_row_of_a_path_is_its_reward() -> None:
    """Pooled outputs have a row for each step tag; two outputs are classes, one is a value."""
    classes = PooledOutputs(verdicts().paths, QWEN)
    answer = pooled([[5.0, 0.0], [0.0, math.log(3)]], [[0.0, 0.0]])
    assert classes.rewards(answer) == pytest.approx([0.75, 0.5])
    value = PooledOutputs(verdicts().paths, SKYWORK)
    assert value.rewards(pooled([0.0], [[9.0], [math.log(3)]])) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize(
    ("form", "data", "message"),
    [
        (QWEN, [], "gave no outputs for a path that ends with '<extra_0>'"),
        (QWEN, [[1.0]], "has 1 outputs; at least 2 are needed"),
        (SKYWORK, [[1.0, 2.0]], "has 2 outputs; exactly one is needed"),
    ],
)
def test_another_head_is_noticed(form: object, data: list[object], message: str) -> None:
    """Outputs that do not fit the format's head are an error."""
    query = PooledOutputs(verdicts().paths, form)  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngineError, match=message):
        query.rewards(pooled(data))


def test_a_format_that_no_server_gives() -> None:
    """No server's answer has the mean over the vocabulary's logits."""
    with pytest.raises(RewardMissing, match="reads 'mean'"):
        reward_request(REWARD_FORMATS["llemma"], TEXT, TEXT)


def test_the_trial_ends_with_the_tag() -> None:
    """The start-up trial's path ends with the tag, so a pooler that reads tags finds one."""
    query = verdicts()
    assert trial_path(query)[-1] == TEXT.token("ки")
    assert isinstance(query.softmax, Softmax)


def test_what_answers_may_lack() -> None:
    """Fields missing from an answer give None or an empty list, never made-up values."""
    assert token_ids({"text": "a"}) is None
    assert token_ids({"logprobs": {"tokens": ["a"]}}) is None
    assert token_ids({"logprobs": {"tokens": ["token_id:7"]}}) == [7]
    assert top_logprobs({}, 0, 4) == []
    assert top_logprobs({"logprobs": {"top_logprobs": [{"a": -2, "b": -1, "c": -3}]}}, 0, 2) == [
        -1,
        -2,
    ]
    assert cached_tokens({"usage": {"prompt_tokens_details": None}}) is None
    assert cached_tokens({"usage": {"prompt_tokens_details": {"cached_tokens": None}}}) == 0


METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE python_gc gauge
python_gc 3.0
"""


def test_vllms_load() -> None:
    """Requests are summed over vLLM's engines; the share of used KV is converted to tokens."""
    assert parse_metrics(METRICS, 1000) == ServerMetrics(held=250, running=3, waiting=4)
    assert parse_metrics("", 0) == ServerMetrics()
