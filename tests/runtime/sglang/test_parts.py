"""Parts of the engine that need no server: step ends, routing, costs, options, connections."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.config_check import check
from hedgerow_sglang.plugin_protocol import REWARD_MODELS
from models.bundled import SPRIG_FOLDER
from runtime.servers.drawn_step import entropy
from runtime.servers.fleet import Fleet, rendezvous
from runtime.servers.remote_server import ServerTimes
from runtime.servers.request_costs import RequestCosts
from runtime.servers.server_errors import ReplicaLost
from runtime.servers.server_metrics import ServerMetrics
from runtime.sglang import launched_server
from runtime.sglang.launched_server import BY_PREFIX, BY_PRIORITY, LaunchOptions
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.sglang_metrics import parse_metrics
from runtime.sglang.sglang_options import SglangOptions
from runtime.sglang.step_request import StepRequest, forked_prefixes
from runtime.stop_strings import StopStringTables
from search.engine import Branch, EngineDown, Hint, Sampling
from search.tree import ROOT, Finish
from server.assemble import server_options, sglang_options
from server.settings import SettingsError, load_settings

PIECES = (b"a", b"b\n", b"\nc", b"<end>")
EOS = frozenset({3})
METRICS = """# HELP sglang:kv_used_tokens used
sglang:kv_used_tokens{model_name="m",tp_rank="0"} 11.0
sglang:kv_evictable_tokens{model_name="m"} 27.0
sglang:max_total_num_tokens{model_name="m"} 2e+04
sglang:evicted_tokens_total{model_name="m"} 5.0
sglang:cached_tokens_total{cache_source="device"} 10.0
sglang:cached_tokens_total{cache_source="host"} 1.0
sglang:eviction_duration_seconds_sum{cache_type="RadixCache"} 0.25
sglang:fwd_occupancy{model_name="m"} NaN
sglang:inter_token_latency_seconds_bucket{le="0.002"} 3.0
"""


def drawing(limit: int = 9) -> StepRequest:
    branch = Branch(0, 0, (0,), 1, limit, 1)
    return StepRequest(branch, Sampling(), StopStringTables(PIECES).of(("\n\n",)), EOS)


def answer(*tokens: int) -> dict:
    """An answer of ``/generate``: each token has probability 1/2, one other token 3/8."""
    half, rest = math.log(0.5), math.log(0.375)
    return {
        "meta_info": {
            "prompt_tokens": 1,
            "output_token_logprobs": [[half, token, None] for token in tokens],
            "output_top_logprobs": [[[half, token, None], [rest, 9, None]] for token in tokens],
        }
    }


def test_a_step_is_cut_where_the_embedded_engine_would_have_stopped() -> None:
    """The stop spans two tokens, the second of which goes on after it; later tokens are dropped."""
    step = drawing()
    step.take(answer(0, 1, 2, 0, 0))
    assert (step.tokens, step.finish) == ([0, 1, 2], Finish.STEP)
    assert step.logprob == pytest.approx(3 * math.log(0.5))
    assert step.entropy == pytest.approx(
        -(0.5 * math.log(0.5) + 0.375 * math.log(0.375) + 0.125 * math.log(0.125))
    )


def test_a_step_that_sglang_stopped_too_early_goes_on() -> None:
    """If SGLang stops too early, the next request asks for the rest of the step."""
    step = drawing(limit=4)
    step.take(answer(0, 1))
    assert step.finish is None
    body = step.body({})
    assert body["input_ids"] == [0, 0, 1]
    assert body["sampling_params"]["max_new_tokens"] == 2
    step.take(answer(1, 1))
    assert (step.tokens, step.finish) == ([0, 1, 1, 1], Finish.LENGTH)


@pytest.mark.parametrize(("at_once", "tokens"), [(0, 4), (2, 2), (9, 4)])
def test_a_step_is_asked_for_in_two_requests(at_once: int, tokens: int) -> None:
    """The first request asks for ``at_once`` tokens (0: all), the second for the whole rest."""
    step = drawing(limit=4)
    step.at_once = at_once
    assert step.body({})["sampling_params"]["max_new_tokens"] == tokens
    step.take(answer(0))
    assert step.body({})["sampling_params"]["max_new_tokens"] == 3


def test_a_prefix_of_several_is_read_first() -> None:
    """A prefix with several draws is read once first, unless the last round drew it."""
    prefixes = [(1,), (2,), (1,), (3,), (3,), (1,)]
    assert forked_prefixes(prefixes, ()) == [(1,), (3,)]
    assert forked_prefixes(prefixes, {(3,), (2,)}) == [(1,)]


def test_the_end_token_ends_the_reply() -> None:
    """A step is cut at the end token, wherever it occurs."""
    step = drawing()
    step.take(answer(0, 3, 0))
    assert (step.tokens, step.finish) == ([0, 3], Finish.END)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=20), st.integers(1, 20))
def test_entropy_of_the_likeliest_is_at_most_the_entropy(weights: list[float], top: int) -> None:
    """The estimate is at most the entropy, and equal to it if ``top`` covers all tokens."""
    shares = sorted((w / sum(weights) for w in weights), reverse=True)
    whole = -math.fsum(p * math.log(p) for p in shares)
    estimate = entropy([math.log(p) for p in shares[:top]])
    assert estimate <= whole + 1e-9
    if top >= len(shares):
        assert estimate == pytest.approx(whole)


@given(st.lists(st.integers(0, 900), max_size=8), st.integers(2, 6), st.integers(0, 5))
def test_a_server_less_moves_only_its_own(prompt: list[int], many: int, gone: int) -> None:
    """Rendezvous hashing: without one server the others keep their order."""
    names = [f"http://s{n}" for n in range(many)]
    lost = names[gone % many]
    before = rendezvous(prompt, names)
    after = rendezvous(prompt, [name for name in names if name != lost])
    assert after == [name for name in before if name != lost]


async def test_searches_share_their_servers_fairly() -> None:
    """Searches of one prompt share a server up to 1.25 times the mean load, then use the next."""
    replicas = [
        Replica(f"http://s{n}", ServerTimes(connect=1, answer=1, probe=1, stall=30))
        for n in range(4)
    ]
    fleet = Fleet("policy", replicas)
    placed = [fleet.place(f"t{n}", (1, 2, 3)).url for n in range(40)]
    assert max(Counter(placed).values()) <= math.ceil(1.25 * 40 / 4)
    assert placed[0] == rendezvous((1, 2, 3), [replica.url for replica in replicas])[0]
    assert [fleet.place(f"t{n}", (1, 2, 3)).url for n in range(40)] == placed
    for replica in replicas:
        replica.up = False
    with pytest.raises(EngineDown, match="no policy server answers"):
        fleet.place("t0", (1, 2, 3))
    await fleet.close()


async def test_every_server_of_a_search_hears_that_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that has moved may have KV on each server it was on, and on every scheduler there;
    one that is lost is not told."""
    messages: list[tuple[str, int | None]] = []

    async def tell(replica: Replica, body: Json) -> None:
        messages.append((replica.url, body.get("routed_dp_rank")))

    monkeypatch.setattr(Replica, "tell", tell)
    times = ServerTimes(connect=1, answer=1, probe=1, stall=30)
    replicas = [Replica(f"http://s{n}", times) for n in range(3)]
    fleet = Fleet("policy", replicas)
    first, *_ = places = [fleet.place("oak", (1,))]
    for _ in range(3):  # to the two others, and back to the first
        places[-1].up = False
        replicas_up = {replica for replica in replicas if replica not in places}
        for replica in replicas_up or {first}:
            replica.up = True
        places.append(fleet.place("oak", (1,)))
    assert places[3] is first
    for replica in replicas:
        replica.plugged, replica.up = True, replica is not places[2]
    places[1].schedulers = 2
    await fleet.release("oak")
    await fleet.release("oak")
    assert Counter(messages) == {(first.url, None): 1, (places[1].url, 0): 1, (places[1].url, 1): 1}
    assert fleet.moves == 3
    await fleet.close()


def test_request_costs_by_hand() -> None:
    """A prompt of 10 read once, two steps of 5 and 3 below it, one read again after an eviction."""

    def flops(tokens: int, context_sum: int, logits: int | None = None) -> float:
        return float(context_sum)

    costs = RequestCosts(flops)
    prompt, long_path, short_path = (1,) * 10, (1,) * 15, (1,) * 13
    costs.read(10, 0, was_cached=False)
    costs.hold(0, prompt, 10)
    for node, path, new_tokens in ((1, long_path, 5), (2, short_path, 3), (3, short_path, 3)):
        costs.read(10, 9, was_cached=True)
        costs.add_decoded(10, new_tokens)
        costs.hold(node, path, new_tokens)
    costs.mark_dead([2])
    assert costs.counters.kv_tokens_peak == 18
    costs.mark_dead([3])
    costs.hold(4, (1,) * 20, 5)
    assert costs.counters.kv_tokens_peak == 20
    costs.read(15, 11, was_cached=True)
    cost = costs.counters
    assert (cost.prefilled_tokens, cost.rehydrated_tokens, cost.rehydrations) == (13, 3, 1)
    assert (cost.cached_tokens, cost.decoded_tokens) == (3 * 9 + 11, 11)
    assert cost.flops == 55 + 3 * 10 + (11 + 12 + 13 + 14) + 2 * (11 + 12) + (12 + 13 + 14 + 15)


def test_priorities_where_a_stock_server_evicts_by_them() -> None:
    """With ``ranks`` a request's priority is 1000 times its parent's value; the prompt has 1000."""
    stock, plain = (
        Replica(f"http://s{n}", ServerTimes(connect=1, answer=1, probe=1, stall=30))
        for n in range(2)
    )
    stock.ranks = True
    notes = PluginNotes("t")
    notes.take(Hint(values={1: 0.25}))
    notes.take(Hint(values={2: 0.7506}))
    priorities = [notes.priority(stock, parent) for parent in (ROOT, 1, 2)]
    assert priorities == [{"priority": 1000}, {"priority": 250}, {"priority": 751}]
    assert notes.priority(plain, 1) == {}


def test_sglangs_own_numbers() -> None:
    """Metrics are summed over labels; missing ones are 0."""
    assert parse_metrics(METRICS) == ServerMetrics(
        held=11, cached=27, capacity=20_000, evicted=5, hit=11, evicting=0.25
    )


@pytest.mark.promise(
    "Launched SGLang servers listen on this machine only, and no option may open them or let "
    "clients run code."
)
def test_servers_are_private_and_run_nobodys_code(tmp_path) -> None:
    """Launched servers listen on 127.0.0.1 only, and options that would open them are refused."""
    python = tmp_path / "python"
    python.touch()
    launch_options = LaunchOptions(SPRIG_FOLDER / "policy", python, device="cpu", kv_tokens=100)
    command = launch_options.command(31_000)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--enable-custom-logit-processor" not in command
    for refused in ("--enable-custom-logit-processor", "--host=0.0.0.0"):
        with pytest.raises(ValueError, match=f"{refused.partition('=')[0]}: not allowed"):
            LaunchOptions(SPRIG_FOLDER / "policy", python, args=(refused,))
    with pytest.raises(ValueError, match="no such file"):
        LaunchOptions(SPRIG_FOLDER / "policy", tmp_path / "none")
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        LaunchOptions(SPRIG_FOLDER / "policy", python, memory=1.0)


def test_settings_say_which_servers() -> None:
    """Settings become engine options; unsupported ones are refused, the embedder is lexical."""
    urls = {
        "HEDGEROW_ENGINE": "sglang",
        "HEDGEROW_POLICY_URLS": "http://a:1, http://b:2/",
        "HEDGEROW_REWARD_URLS": "http://c:3",
    }
    options = sglang_options(load_settings(urls))
    assert (options.policy_urls, options.reward_urls) == (
        ("http://a:1", "http://b:2"),
        ("http://c:3",),
    )
    assert options.embedder == "lexical"
    with pytest.raises(SettingsError, match="no hidden states"):
        sglang_options(load_settings(urls | {"HEDGEROW_EMBEDDER": "hidden"}))
    assert sglang_options(load_settings(urls | {"HEDGEROW_SPECULATE": "true"})).speculate
    with pytest.raises(SettingsError, match="must start with http"):
        load_settings({"HEDGEROW_POLICY_URLS": "a:1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "sglang", "launch_python": "/no/python"},
            "'/no/python': there is no such file",
        ),
        ({"engine": "sglang", "policy_urls": "http://a:1"}, "reward_urls: (); reward_format"),
        ({"engine": "openai"}, "policy_urls: none; at least one server"),
        (
            {"engine": "openai", "policy_urls": "http://a:1", "reward_format": "score"},
            "reward_urls: none; reward_format 'score' needs a server",
        ),
    ],
)
def test_a_check_refuses_what_a_start_would(settings: dict[str, str], message: str) -> None:
    """``check`` refuses what a start would, also for launched servers."""
    environ = {f"HEDGEROW_{name.upper()}": value for name, value in settings.items()}
    with pytest.raises(SettingsError, match=re.escape(message)):
        check(load_settings(environ))


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ('{"architectures": ["Qwen2ForProcessRewardModel"]}', REWARD_MODELS),
        ('{"architectures": ["Qwen2ForPrmModel"]}', REWARD_MODELS),
        ('{"architectures": ["Qwen2ForSequenceClassification"]}', REWARD_MODELS),
        ('{"architectures": ["LlamaForSequenceClassification"]}', None),
        ("{}", None),
        ("", None),
    ],
)
def test_classes_that_sglang_lacks_are_brought_along(
    config: str, package: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only checkpoints of these classes need our model package in the server's environment."""
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    (tmp_path / "config.json").write_text(config)
    launch_options = LaunchOptions(tmp_path, sys.executable, classifies=True)
    assert launch_options.environment().get("SGLANG_EXTERNAL_MODEL_PACKAGE") == package


def test_a_port_is_none_that_is_taken_or_given_to_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Free ports are below Linux's outgoing range, because servers bind them long afterwards."""
    assert launched_server.free_port() < 32_768  # where Linux's range for connections begins
    with socket.socket() as listener:
        listener.bind((launched_server.HOST, 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr(launched_server, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"every port from {port} to {port} is taken"):
            launched_server.free_port()


def test_launched_servers_share_the_memory_as_set(tmp_path) -> None:
    """Servers get the memory shares that are set, and KV in tokens where these are given."""
    python = tmp_path / "python"
    python.touch()
    launch = {
        "HEDGEROW_ENGINE": "sglang",
        "HEDGEROW_LAUNCH": "true",
        "HEDGEROW_LAUNCH_PYTHON": str(python),
        "HEDGEROW_LAUNCH_DEVICE": "cuda",
    }
    policy, reward = server_options(load_settings(launch | {"HEDGEROW_KV_TOKENS": "5000"}))
    assert (policy.memory, reward.memory) == (0.6, 0.75)
    assert (policy.kv_tokens, reward.kv_tokens) == (5000, None)
    assert not set(BY_PRIORITY) & {*policy.command(1), *reward.command(1)}
    assert set(BY_PREFIX) <= set(policy.command(1))
    early, reward = server_options(load_settings(launch | {"HEDGEROW_SPECULATE": "true"}))
    assert set(BY_PRIORITY) <= set(early.command(1))
    assert not set(BY_PREFIX) & set(early.command(1))
    assert not set(BY_PRIORITY) & set(reward.command(1))
    more = {"HEDGEROW_LAUNCH_MEMORY": "0.8,0.5", "HEDGEROW_REWARD_FORMAT": "none"}
    (alone,) = server_options(load_settings(launch | more))
    assert alone.memory == 0.8


def test_options_that_cannot_be_met() -> None:
    """Options that cannot be met are refused by name, before any request."""
    with pytest.raises(ValueError, match="policy_urls: none"):
        SglangOptions(SPRIG_FOLDER / "policy", ())
    with pytest.raises(ValueError, match=r"reward_urls: .*math-shepherd"):
        SglangOptions(SPRIG_FOLDER / "policy", ("http://a",))
    for url, message in {
        "http://": "a server is needed",
        "http://a:99999": "a server is needed",
        "http://a:b": "Invalid port: 'b'",
    }.items():
        with pytest.raises(ValueError, match=f"policy_urls: '{url}'.*{message}"):
            SglangOptions(SPRIG_FOLDER / "policy", (url,), reward_format="none")


def test_one_model_a_server(tmp_path) -> None:
    """A models file is refused, because further models would be requested of the same servers."""
    file = tmp_path / "models.toml"
    file.write_text('["other"]\nwidth = 1\n')
    settings = {"HEDGEROW_ENGINE": "sglang", "HEDGEROW_POLICY_URLS": "http://a"}
    with pytest.raises(SettingsError, match=r"MODELS_FILE = .*take --engine embedded"):
        check(load_settings(settings | {"HEDGEROW_MODELS_FILE": str(file)}))


@pytest.mark.promise(
    "A request to SGLang whose connection ends without an answer is sent once more before its "
    "server counts as lost."
)
@pytest.mark.parametrize(
    "ask",
    [lambda replica: replica.generate({}), Replica.info, Replica.metrics, Replica.check],
    ids=["generate", "info", "metrics", "check"],
)
async def test_a_connection_that_ends_without_a_word_is_not_a_lost_server(
    ask: Callable[[Replica], Awaitable[object]],
) -> None:
    """A request whose connection ends is sent once more; after a second end the server is lost."""
    requests = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            await reader.readuntil(b"}")
        if requests == patience:
            body = b'{"meta_info":{},"internal_states":[]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    replica = Replica(url, ServerTimes(connect=5, answer=5, probe=5, stall=30))
    try:
        patience = 2
        await ask(replica)
        assert (requests, replica.up) == (2, True)
        requests, patience = 0, 3
        with suppress(ReplicaLost):
            await ask(replica)
        assert (requests, replica.up) == (2, False)
    finally:
        await replica.close()
        server.close()
