"""Text to ids and back: decoded pieces join to the text, wherever it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from runtime.profiles import PROFILES
from runtime.text import Text
from tests.runtime.tiny_models import make_tokenizer

CONFIG = {"max_position_embeddings": 128, "vocab_size": 300, "eos_token_id": 262}
WORDS = ["▁", "▁Hi", "▁the", "re", ".", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A byte-level BPE checkpoint."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [261, 263]}')
    return Text(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A checkpoint whose tokens carry their leading spaces, with bytes to fall back to."""
    folder: Path = tmp_path_factory.mktemp("pieces")
    bpe = models.BPE({word: i for i, word in enumerate(WORDS)}, [], byte_fallback=True)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Text(folder)


@settings(max_examples=200)
@example(text="the th", cuts=[1])
@given(
    text=st.text(max_size=30).filter(lambda text: "<|" not in text),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_pieces_joined_are_the_text(byte_level: Text, text: str, cuts: list[int]) -> None:
    """Pieces join to the text, also if a cut splits a character's bytes."""
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    pieces = [byte_level.decode(ids[a:b], ids[:a], last=b == len(ids)) for a, b in pairwise(edges)]
    assert "".join(pieces) == text


def test_decoding_is_what_the_tokenizer_says(byte_level: Text) -> None:
    """Decoding drops special tokens and gives replacement characters for invalid bytes."""
    tokenizer = AutoTokenizer.from_pretrained(byte_level.checkpoint)
    for text in ("the = 1\n\n", "<|user|>é<|end|>", "漢字 😀"):
        ids = byte_level.encode(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert byte_level.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    half = byte_level.encode("é")[:1]
    assert byte_level.decode(half) == "\N{REPLACEMENT CHARACTER}"
    assert byte_level.decode(half, last=False) == ""


def test_leading_spaces_are_kept_in_context(sentencepiece: Text) -> None:
    """The first token of a text loses its space, the first token of a later piece keeps it."""
    hi, the, re = (WORDS.index(word) for word in ("▁Hi", "▁the", "re"))
    assert sentencepiece.decode([hi, the, re]) == "Hi there"
    assert sentencepiece.decode([the, re], [hi]) == " there"
    bytes_of_e = [WORDS.index("<0xC3>"), WORDS.index("<0xA9>")]
    assert sentencepiece.decode(bytes_of_e[1:], [hi, bytes_of_e[0]]) == "é"
    assert sentencepiece.pieces[the] == b" the"


def test_what_ends_a_reply(byte_level: Text, sentencepiece: Text) -> None:
    """Ids of the generation config, the config and the tokenizer all end a reply."""
    end = byte_level.token("<|end|>")
    assert byte_level.eos == {262, 261, 263, end}
    assert sentencepiece.eos == {262}
    assert (byte_level.context, byte_level.vocab_size) == (128, 300)
    assert len(byte_level.pieces) == 300


def test_chat_prompts(byte_level: Text, sentencepiece: Text) -> None:
    """Prompts follow the chat template; without one they are the contents, each with a newline."""
    messages = [{"role": "user", "content": "the 1"}]
    prompt = byte_level.encode_chat(messages)
    assert prompt == byte_level.encode("<|user|>the 1<|end|><|assistant|>")
    assert byte_level.decode(prompt) == "the 1"
    plain = Text(sentencepiece.checkpoint)
    plain.__dict__["tokenizer"] = type("Plain", (), {"chat_template": None})()
    assert plain.encode_chat([{"role": "user", "content": "Hi"}]) == plain.encode("Hi\n")


def test_one_token_or_none(byte_level: Text) -> None:
    """A text's own token, also a special one; None for more than one."""
    assert byte_level.token("+") == byte_level.encode("+")[0]
    assert byte_level.pieces[byte_level.token("ки") or 0] == "ки".encode()
    assert byte_level.token("++") is None


def test_profiles_are_filed_under_their_names() -> None:
    """Profiles are listed by their own names, and each has a step delimiter."""
    assert all(name == p.name and p.delimiter for name, p in PROFILES.items())
