"""Servers that do not fit are refused by their own description, before they do any work."""

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
    model_info = {
        "model_path": str(model),
        "tokenizer_path": str(model),
        "is_generation": not embeds,
        "architectures": config["architectures"],
    }
    return {"/server_info": server | more, "/model_info": model_info}


def compared(model: Path, expected: ExpectedServer, **more: Any) -> str:
    """What is wrong with a server of the model in this folder, joined by "; "."""
    info = described(model, **more)
    return "; ".join(expected.compare(ServerInfo(info["/server_info"], info["/model_info"])).wrong)


def policy(model: Path = POLICY) -> ExpectedServer:
    return ExpectedServer("policy", Text(model))


def reward(model: Path, form: str) -> ExpectedServer:
    return ExpectedServer("reward", Text(model), reward_format(form))


def test_the_right_server_fits() -> None:
    """For the right server nothing is wrong or unknown, and there are no notes."""
    answers = described(POLICY)
    match = policy().compare(ServerInfo(answers["/server_info"], answers["/model_info"]))
    assert (match.wrong, match.unknown, match.notes) == ((), (), ())
    assert compared(PRM, reward(PRM, "math-shepherd")) == ""


def test_a_verdict_format_on_an_embedding_server() -> None:
    """An embedding server would end with the first verdict request, so it is refused."""
    wrong = compared(PRM, reward(PRM, "math-shepherd"), embeds=True)
    assert "is an embedding server (--is-embedding), reward format 'math-shepherd' reads" in wrong
    assert "start it without --is-embedding, or take" in wrong
    assert "skywork, qwen2.5-math-prm" in wrong
    assert "draws nothing" in compared(POLICY, policy(), embeds=True)


def test_a_head_on_a_generation_server(tmp_path: Path) -> None:
    """A format that reads a head is refused on a generation server."""
    model = CASES["skywork"].make(tmp_path)
    wrong = compared(model, reward(model, "skywork"))
    assert "is a generation server, reward format 'skywork' reads the outputs of a head" in wrong
    assert "start it with --is-embedding" in wrong


def test_heads_of_other_outputs(tmp_path: Path) -> None:
    """Heads with one output for two, two for one, and none at all are refused."""
    one_output = CASES["skywork"].make(tmp_path / "one")
    two_outputs = CASES["qwen2.5-math-prm"].make(tmp_path / "two")
    assert "has 1 output, reward format 'qwen2.5-math-prm' reads class 1" in compared(
        one_output, reward(one_output, "qwen2.5-math-prm"), embeds=True
    )
    assert "has 2 outputs, reward format 'skywork' reads one" in compared(
        two_outputs, reward(two_outputs, "skywork"), embeds=True
    )
    assert compared(two_outputs, reward(two_outputs, "qwen2.5-math-prm"), embeds=True) == ""
    assert "LlamaForCausalLM has no reward head" in compared(
        PRM, reward(PRM, "qwen2.5-math-prm"), embeds=True
    )


def test_another_model_by_each_of_its_signs(tmp_path: Path) -> None:
    """Another model is noticed by class, size, vocabulary, tokenizer, or else by its weights."""
    base = make_checkpoint(tmp_path / "base", "qwen2", seed=1)
    other = make_checkpoint(tmp_path / "class", "qwen3", seed=1)
    wrong = compared(other, policy(base))
    assert "class Qwen3ForCausalLM instead of Qwen2ForCausalLM" in wrong
    assert f"({other}) than --model {base}" in wrong
    assert (
        f"start it with --model-path {base}, or name the served model's folder by --model" in wrong
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
    ("option", "message"),
    [
        ({"skip_tokenizer_init": True}, "start it without --skip-tokenizer-init"),
        ({"preferred_sampling_params": {"top_k": 5}}, "samples by {'top_k': 5} beside"),
        ({"disaggregation_mode": "prefill"}, "does prefill alone"),
        ({"disaggregation_mode": "null"}, ""),
    ],
)
def test_options_that_a_search_cannot_bear(option: dict[str, Any], message: str) -> None:
    """SGLang options that make searches impossible are refused by name."""
    wrong = compared(POLICY, policy(), **option)
    assert message in wrong
    assert bool(message) == bool(wrong)


def test_what_works_at_a_price() -> None:
    """A shorter context, no prefix cache and client code give notes rather than refusals."""
    price = {"disable_radix_cache": True, "enable_custom_logit_processor": True}
    answers = described(POLICY, max_req_input_len=250, **price)
    match = policy().compare(ServerInfo(answers["/server_info"], answers["/model_info"]))
    assert match.wrong == ()
    assert (
        match.notes[0] == "it takes 250 tokens of the model's context of 1024; searches end there"
    )
    assert ["--enable-custom" in match.notes[1], "every prefix" in match.notes[2]] == [True, True]


def test_what_a_server_elsewhere_does_not_tell() -> None:
    """If the model's files are not readable here, the server's tokenizer spells a test text."""
    model = {"is_generation": True, "architectures": ["LlamaForCausalLM"], "model_path": "/no/such"}
    server, expected = {"internal_states": [STATE]}, policy()
    assert expected.asks_tokenizer(ServerInfo(server, model))
    open_still = expected.compare(ServerInfo(server, model))
    assert open_still.wrong == ()
    assert open_still.unknown == (
        "sizes, vocabulary, weights (/no/such is not readable here)",
        "the tokenizer",
    )
    ours = expected.spelt()
    fits = expected.compare(ServerInfo(server, model, ids=[1, *ours]))
    assert (fits.wrong, "the tokenizer" in fits.unknown) == ((), False)
    (wrong,) = expected.compare(ServerInfo(server, model, ids=ours[::-1])).wrong
    assert "another tokenizer" in wrong
    (named,) = expected.compare(
        ServerInfo(server, model | {"architectures": ["Qwen3ForCausalLM"]})
    ).wrong
    assert "class Qwen3ForCausalLM instead of LlamaForCausalLM" in named
    nothing = policy().compare(ServerInfo(server))
    assert (nothing.wrong, nothing.unknown[0]) == ((), "the class")


class Stub:
    """A server with an answer for each path: JSON, a string as HTML, or an int as a status."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.paths: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        self.paths.append(path)
        reply = self.answers.get(path, 404)
        kind, status = "application/json", 200
        if isinstance(reply, int):
            status, reply = reply, {}
        if isinstance(reply, str):
            kind, body = "text/html; charset=utf-8", reply.encode()
        else:
            body = json.dumps(reply).encode()
        about = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n"
        writer.write(f"{about}content-length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()


@asynccontextmanager
async def stubs(*answers: dict[str, Any]) -> AsyncIterator[list[Stub]]:
    """Listening servers with these answers."""
    servers, listening = [Stub(by_path) for by_path in answers], []
    for stub in servers:
        listening.append(await asyncio.start_server(stub.answer, "127.0.0.1", 0))
        stub.url = f"http://127.0.0.1:{listening[-1].sockets[0].getsockname()[1]}"
    try:
        yield servers
    finally:
        for listener in listening:
            listener.close()


def options(*urls: str, **more: Any) -> SglangOptions:
    return SglangOptions(POLICY, urls, reward_format="none", **more)


async def test_each_of_several_servers_is_compared(tmp_path: Path) -> None:
    """A server that does not fit is named at once, even while another is not up yet; it was asked
    nothing that computes."""
    other = make_checkpoint(tmp_path, "qwen3")
    async with stubs(described(POLICY), described(other)) as (right, wrong):
        absent = "http://127.0.0.1:9"
        with pytest.raises(ValueError, match=f"policy_urls: {wrong.url}: it serves another model"):
            await SglangEngine.start(options(right.url, wrong.url, absent))
        assert set(wrong.paths) <= {"/server_info", "/model_info", "/get_model_info", "/tokenize"}


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({}, "status 404 and application/json; .* not a router"),
        ({"/server_info": "<html>"}, "status 200 and text/html"),
        ({"/server_info": {"vllm_config": {}}}, "status 200 and application/json"),
        ({"/server_info": 401}, "wants a key .* without --api-key"),
    ],
)
async def test_another_kind_of_server_is_said_at_once(pages: dict[str, Any], message: str) -> None:
    """A server of another kind is refused without waiting."""
    async with stubs(pages) as (stub,), asyncio.timeout(30):
        with pytest.raises(ValueError, match=f"policy_urls: {stub.url}.*{message}"):
            await SglangEngine.start(options(stub.url))


@pytest.mark.parametrize(
    ("scheme", "greeting"), [("https", b""), ("http", b"-ERR unknown command\r\n\r\n")]
)
async def test_a_port_that_speaks_otherwise_is_said_at_once(scheme: str, greeting: bytes) -> None:
    """TLS to a server without it, and HTTP to one with another protocol, are refused at once."""

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
    """The wait lasts ``start_seconds`` and is logged with the system's reason."""
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
    """A server back with another model, no plug-in or less context gets no work until it fits."""
    monkeypatch.setattr(liveness, "REVIVAL_WAITS", (0.01,))
    other, as_it_was = make_checkpoint(tmp_path, "qwen3"), described(POLICY)
    as_it_was["/server_info"]["internal_states"] = [PLUGGED]
    async with (
        stubs(as_it_was | {"/health": 503}) as (stub,),
        closing(await SglangEngine.start(options(stub.url))) as engine,
    ):
        (server,) = engine._policy.replicas
        for answers, why in (
            (described(other), "another model"),
            (described(POLICY), "draws by seed no more"),
            (described(POLICY, max_req_input_len=50, internal_states=[PLUGGED]), "context is"),
        ):
            stub.answers = {"/health": 503}
            with pytest.raises(EngineDown):
                await engine.health()
            stub.answers = answers | {"/health": {}, "/health_generate": {}}
            await until(lambda why=why: why in server.wrong)
            assert not server.up
            with pytest.raises(EngineDown, match=f"no policy server answers: .*{why}"):
                await engine.health()
        stub.answers = as_it_was | {"/health": {}, "/health_generate": {}}
        await until(lambda: server.up)
        await engine.health()
    assert "it gets no work: http" in caplog.text


async def test_a_tokenizer_is_asked_where_files_do_not_tell() -> None:
    """Without readable files the tokenizer is compared by ``/tokenize``."""
    answers = described(POLICY)
    for info in answers.values():
        info.update({"model_path": "/no/such", "tokenizer_path": "/no/such"})
    async with stubs(answers | {"/tokenize": {"tokens": [1, 2, 3]}}) as (stub,):
        with pytest.raises(ValueError, match="another tokenizer"):
            await SglangEngine.start(options(stub.url))
        stub.answers["/tokenize"] = {"tokens": Text(POLICY).encode(PROBE)}
        engine = await SglangEngine.start(options(stub.url))
        await engine.close()
