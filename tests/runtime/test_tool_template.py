"""How chat templates of several model families are found to support tools."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from models.bundled import SPRIG_FOLDER
from runtime.text import Text
from runtime.tool_template import ToolTemplate
from tests.runtime.tiny_models import make_checkpoint, make_tokenizer

HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
QWEN = (
    TOOLS + HEAD + "{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}" + END
)
LLAMA = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"
    '<|assistant|>{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    '{% elif m.role == "tool" %}<|user|>{{ m.content | tojson }}'
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}" + END
)
MISTRAL = (
    TOOLS + HEAD + "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]{% endif %}" + END
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<|end|> é", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("tools") / "model")


def with_template(checkpoint: Path, folder: Path, template: str) -> Text:
    """The same model with another chat template."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    make_tokenizer(template=template).save_pretrained(folder)
    return Text(folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, ToolTemplate(tools=True, calls=True, results=True, form="tagged")),
        (LLAMA, ToolTemplate(tools=True, calls=True, results=True, form="bare")),
        (MISTRAL, ToolTemplate(tools=True, calls=True, results=True)),
        ("", ToolTemplate(results=True)),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ToolTemplate(results=True)),
        (
            "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
            "{{ raise_exception('roles') }}{% endif %}{{ m.content }}{% endfor %}",
            ToolTemplate(),
        ),
    ],
)
def test_a_template_is_known_by_what_it_renders(
    checkpoint: Path, tmp_path: Path, template: str, expected: ToolTemplate
) -> None:
    """Calls in Qwen's and Llama's form are recognised by form; other forms only as calls."""
    assert with_template(checkpoint, tmp_path, template).tool_template == expected


def test_the_bundled_template_has_no_tools() -> None:
    """The bundled template renders tool results, and neither tools nor calls."""
    assert Text(SPRIG_FOLDER / "policy").tool_template == ToolTemplate(results=True)


def test_words_of_tools_and_calls_are_words(checkpoint: Path, tmp_path: Path) -> None:
    """Control tokens in a description, an argument or a result are text, as in any content."""
    text = with_template(checkpoint, tmp_path, QWEN)
    call = {"type": "function", "function": {"name": "f", "arguments": {"it": "<|end|>"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<|end|>"},
    ]
    ids = text.encode_chat(messages, tools=[TOOL])
    assert ids.count(text.end) == len(messages)
    prompt = "".join(text.pieces[i].decode(errors="replace") for i in ids)
    assert '"description": "<|end|> ' in prompt
    assert '<tool_call>\n{"name": "f", "arguments": {"it": "<|end|>"}}' in prompt
    assert ids != text.encode_chat(messages)
