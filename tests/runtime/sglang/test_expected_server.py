"""What does not fit is said before anything is asked of a server, by what it says of itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from models.bundled import SPRIG_FOLDER
from runtime.reward_format import reward_format
from runtime.servers import fleet, liveness, waiting
from runtime.sglang.expected_server import PROBE, ExpectedServer, ServerInfo
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.engine import EngineDown
from tests.closing import closing
from tests.runtime.test_reward_models import CASES
from tests.runtime.tiny_models import make_checkpoint

POLICY, PRM = SPRIG_FOLDER / "policy", SPRIG_FOLDER / "prm"
STATE = {"effective_max_running_requests_per_dp": 8}
PLUGGED = STATE | {"hedgerow": {"seeds": 1, "evicts": 1}}


def described(model: Path, *, embeds: bool = False, **more: Any) -> dict[str, Any]:
    """``/server_info`` and ``/model_info`` of a server of a folder, as SGLang 0.5.23 gives them."""
    config = json.loads((model / "config.json").read_text())
    server = {
        "internal_states": [STATE],
        "max_total_num_tokens": 4096,
        "max_req_input_len": 1018,
        "model_path": str(model),
        "is_embedding": embeds,
    }
    told = {
        "model_path": str(model),
        "tokenizer_path": str(model),
        "is_generation": not embeds,
        "architectures": config["architectures"],
    }
    return {"/server_info": server | more, "/model_info": told}


def compared(model: Path, expected: ExpectedServer, **more: Any) -> str:
    """What is wrong with a server of a folder."""
    said = described(model, **more)
    return "; ".join(expected.compare(ServerInfo(said["/server_info"], said["/model_info"])).wrong)


def policy(model: Path = POLICY) -> ExpectedServer:
    return ExpectedServer("policy", Text(model))


def reward(model: Path, form: str) -> ExpectedServer:
    return ExpectedServer("reward", Text(model), reward_format(form))


def test_the_right_server_fits() -> None:
    """Nothing is wrong, and nothing is left open."""
    said = described(POLICY)
    found = policy().compare(ServerInfo(said["/server_info"], said["/model_info"]))
    assert (found.wrong, found.unknown, found.notes) == ((), (), ())
    assert compared(PRM, reward(PRM, "math-shepherd")) == ""


def test_a_verdict_format_on_an_embedding_server() -> None:
    """It would end with the first verdict."""
    said = compared(PRM, reward(PRM, "math-shepherd"), embeds=True)
    assert "is an embedding server (--is-embedding), reward format 'math-shepherd' reads" in said
    assert "start it without --is-embedding, or take" in said
    assert "skywork, qwen2.5-math-prm" in said
    assert "draws nothing" in compared(POLICY, policy(), embeds=True)


def test_a_head_on_a_generation_server(tmp_path: Path) -> None:
    """The other way round."""
    model = CASES["skywork"].make(tmp_path)
    said = compared(model, reward(model, "skywork"))
    assert "is a generation server, reward format 'skywork' reads the outputs of a head" in said
    assert "start it with --is-embedding" in said


def test_heads_of_other_outputs(tmp_path: Path) -> None:
    """One for two, two for one, and hidden states for either."""
    one = CASES["skywork"].make(tmp_path / "one")
    two = CASES["qwen2.5-math-prm"].make(tmp_path / "two")
    assert "has 1 output, reward format 'qwen2.5-math-prm' reads class 1" in compared(
        one, reward(one, "qwen2.5-math-prm"), embeds=True
    )
    assert "has 2 outputs, reward format 'skywork' reads one" in compared(
        two, reward(two, "skywork"), embeds=True
    )
    assert compared(two, reward(two, "qwen2.5-math-prm"), embeds=True) == ""
    assert "LlamaForCausalLM has no reward head" in compared(
        PRM, reward(PRM, "qwen2.5-math-prm"), embeds=True
    )


def test_another_model_by_each_of_its_signs(tmp_path: Path) -> None:
    """Its class, a size, its vocabulary, its tokenizer; with all of these alike, its weights."""
    base = make_checkpoint(tmp_path / "base", "qwen2", seed=1)
    other = make_checkpoint(tmp_path / "class", "qwen3", seed=1)
    said = compared(other, policy(base))
    assert "class Qwen3ForCausalLM instead of Qwen2ForCausalLM" in said
    assert f"({other}) than --model {base}" in said
    assert (
        f"start it with --model-path {base}, or name the served model's folder by --model" in said
    )
    deep = make_checkpoint(tmp_path / "deep", "qwen2", num_hidden_layers=3)
    assert "num_hidden_layers 3 instead of 2" in compared(deep, policy(base))
    wide = make_checkpoint(tmp_path / "wide", "qwen2", vocab_size=512)
    assert "vocab_size 512 instead of" in compared(wide, policy(base))
    assert "another tokenizer" in compared(POLICY, policy(base))
    tuned = make_checkpoint(tmp_path / "tuned", "qwen2", seed=2)
    assert "other weights" in compared(tuned, policy(base))
    assert compared(make_checkpoint(tmp_path / "copy", "qwen2", seed=1), policy(base)) == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"skip_tokenizer_init": True}, "start it without --skip-tokenizer-init"),
        ({"preferred_sampling_params": {"top_k": 5}}, "samples by {'top_k': 5} beside"),
        ({"disaggregation_mode": "prefill"}, "does prefill alone"),
        ({"disaggregation_mode": "null"}, ""),
    ],
)
def test_options_that_a_search_cannot_bear(option: dict[str, Any], said: str) -> None:
    """Of what SGLang tells of its start."""
    found = compared(POLICY, policy(), **option)
    assert said in found
    assert bool(said) == bool(found)


def test_what_works_at_a_price() -> None:
    """Less context, every prefix read again, code of whoever asks: said, not refused."""
    price = {"disable_radix_cache": True, "enable_custom_logit_processor": True}
    said = described(POLICY, max_req_input_len=250, **price)
    found = policy().compare(ServerInfo(said["/server_info"], said["/model_info"]))
    assert found.wrong == ()
    assert (
        found.notes[0] == "it takes 250 tokens of the model's context of 1024; searches end there"
    )
    assert ["--enable-custom" in found.notes[1], "every prefix" in found.notes[2]] == [True, True]


def test_what_a_server_elsewhere_does_not_tell() -> None:
    """Files that cannot be read here; its tokenizer is asked to spell a text instead."""
    told = {"is_generation": True, "architectures": ["LlamaForCausalLM"], "model_path": "/no/such"}
    server, expected = {"internal_states": [STATE]}, policy()
    assert expected.asks_tokenizer(ServerInfo(server, told))
    open_still = expected.compare(ServerInfo(server, told))
    assert open_still.wrong == ()
    assert open_still.unknown == (
        "sizes, vocabulary, weights (/no/such is not readable here)",
        "the tokenizer",
    )
    ours = expected.spelt()
    fits = expected.compare(ServerInfo(server, told, ids=[1, *ours]))
    assert (fits.wrong, "the tokenizer" in fits.unknown) == ((), False)
    (wrong,) = expected.compare(ServerInfo(server, told, ids=ours[::-1])).wrong
    assert "another tokenizer" in wrong
    (named,) = expected.compare(
        ServerInfo(server, told | {"architectures": ["Qwen3ForCausalLM"]})
    ).wrong
    assert "class Qwen3ForCausalLM instead of LlamaForCausalLM" in named
    nothing = policy().compare(ServerInfo(server))
    assert (nothing.wrong, nothing.unknown[0]) == ((), "the class")


class Stub:
    """A server by what it answers to each path; a string is sent as HTML, None is not answered."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        self.asked.append(path)
        said = self.said.get(path, 404)
        kind, status = "application/json", 200
        if isinstance(said, int):
            status, said = said, {}
        if isinstance(said, str):
            kind, body = "text/html; charset=utf-8", said.encode()
        else:
            body = json.dumps(said).encode()
        about = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n"
        writer.write(f"{about}content-length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()


@asynccontextmanager
async def stubs(*said: dict[str, Any]) -> AsyncIterator[list[Stub]]:
    """Servers that listen."""
    made, listening = [Stub(one) for one in said], []
    for stub in made:
        listening.append(await asyncio.start_server(stub.answer, "127.0.0.1", 0))
        stub.url = f"http://127.0.0.1:{listening[-1].sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        for one in listening:
            one.close()


def options(*urls: str, **more: Any) -> SglangOptions:
    return SglangOptions(POLICY, urls, reward_format="none", **more)


async def test_each_of_several_servers_is_compared(tmp_path: Path) -> None:
    """The one that does not fit is named, at once, though another one is not there yet; nothing
    that computes was asked of it."""
    other = make_checkpoint(tmp_path, "qwen3")
    async with stubs(described(POLICY), described(other)) as (right, wrong):
        absent = "http://127.0.0.1:9"
        with pytest.raises(ValueError, match=f"policy_urls: {wrong.url}: it serves another model"):
            await SglangEngine.start(options(right.url, wrong.url, absent))
        assert set(wrong.asked) <= {"/server_info", "/model_info", "/get_model_info", "/tokenize"}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({}, "status 404 and application/json; .* not a router"),
        ({"/server_info": "<html>"}, "status 200 and text/html"),
        ({"/server_info": {"vllm_config": {}}}, "status 200 and application/json"),
        ({"/server_info": 401}, "wants a key .* without --api-key"),
    ],
)
async def test_another_kind_of_server_is_said_at_once(said: dict[str, Any], named: str) -> None:
    """Whatever it is: none of them becomes a SGLang server by waiting."""
    async with stubs(said) as (stub,), asyncio.timeout(30):
        with pytest.raises(ValueError, match=f"policy_urls: {stub.url}.*{named}"):
            await SglangEngine.start(options(stub.url))


@pytest.mark.parametrize(
    ("scheme", "greeting"), [("https", b""), ("http", b"-ERR unknown command\r\n\r\n")]
)
async def test_a_port_that_speaks_otherwise_is_said_at_once(scheme: str, greeting: bytes) -> None:
    """TLS asked of a server without, HTTP of one that speaks something else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting or b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening, asyncio.timeout(30):
        url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        with pytest.raises(ValueError, match=f"policy_urls: {url}: no SGLang server"):
            await SglangEngine.start(options(url))


async def test_a_server_that_is_not_there_is_waited_for_aloud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as was said; the reason is the system's."""
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0.01)
    url = "http://127.0.0.1:9"
    with caplog.at_level(logging.INFO), pytest.raises(EngineDown, match=r"waited 0\.3 s for it"):
        await SglangEngine.start(options(url, start_seconds=0.3))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) > 2
    assert all(line.startswith("waiting for a policy server, ") for line in lines)
    assert f"of up to 0.3 s: {url} does not answer (connection refused)" in lines[-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_who_comes_back_as_another_model_gets_no_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor without the plug-in it had, or with less context; as it was it does."""
    monkeypatch.setattr(liveness, "REVIVAL_WAITS", (0.01,))
    other, as_it_was = make_checkpoint(tmp_path, "qwen3"), described(POLICY)
    as_it_was["/server_info"]["internal_states"] = [PLUGGED]
    async with (
        stubs(as_it_was | {"/health": 503}) as (stub,),
        closing(await SglangEngine.start(options(stub.url))) as engine,
    ):
        (server,) = engine._policy.replicas
        for said, why in (
            (described(other), "another model"),
            (described(POLICY), "draws by seed no more"),
            (described(POLICY, max_req_input_len=50, internal_states=[PLUGGED]), "context is"),
        ):
            stub.said = {"/health": 503}
            with pytest.raises(EngineDown):
                await engine.health()
            stub.said = said | {"/health": {}, "/health_generate": {}}
            await until(lambda why=why: why in server.wrong)
            assert not server.up
            with pytest.raises(EngineDown, match=f"no policy server answers: .*{why}"):
                await engine.health()
        stub.said = as_it_was | {"/health": {}, "/health_generate": {}}
        await until(lambda: server.up)
        await engine.health()
    assert "it gets no work: http" in caplog.text


async def test_a_tokenizer_is_asked_where_files_do_not_tell() -> None:
    """By ``/tokenize``, which computes nothing."""
    said = described(POLICY)
    for told in said.values():
        told.update({"model_path": "/no/such", "tokenizer_path": "/no/such"})
    async with stubs(said | {"/tokenize": {"tokens": [1, 2, 3]}}) as (stub,):
        with pytest.raises(ValueError, match="another tokenizer"):
            await SglangEngine.start(options(stub.url))
        stub.said["/tokenize"] = {"tokens": Text(POLICY).encode(PROBE)}
        engine = await SglangEngine.start(options(stub.url))
        await engine.close()
