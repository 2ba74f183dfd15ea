"""A checkpoint's tokenizer: chat prompts to token ids, ids to text, what ends a reply."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import AddedToken, Tokenizer

from runtime.checkpoint import read_config
from runtime.token_bytes import most_bytes_a_token, spell_byte_level, spell_sentencepiece
from runtime.tool_template import Messages, Tools, ToolTemplate, read_tool_template
from search.engine import PrefixTooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTER_BYTES = 4
_ANCHOR = "\n"
_DATE = "26 Jul 2024"
_BREAK = "\udc00"
"""Half a character, which no text holds: the parts before and after it are encoded separately."""
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.json", "*.tiktoken")
"""Files of which every tokenizer has at least one."""
_BRACKETS = frozenset("<[{|")
"""An added token that begins with one of these is a control token, not a word."""
_THOUGHTS = frozenset({"<think>", "</think>"})
"""Models write these and clients send them back; chat templates remove what is between them."""


class Text:
    """The tokenizer and text settings of a Hugging Face checkpoint on disk.

    Cheap to make: the tokenizer is loaded at first use.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises ValueError if ``checkpoint`` is not a folder with a config.json."""
        self.checkpoint = Path(checkpoint)
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(f"checkpoint: {checkpoint}; a folder with a config.json is needed")
        self._config = read_config(self.checkpoint)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer, for its chat template. Raises ValueError without one."""
        if not any(next(self.checkpoint.glob(name), None) for name in _TOKENIZERS):
            raise ValueError(f"{self.checkpoint}: holds no tokenizer; tokenizer.json is needed")
        from transformers import AutoTokenizer  # takes seconds: only who needs it waits

        return AutoTokenizer.from_pretrained(str(self.checkpoint), local_files_only=True)

    @property
    def context(self) -> int:
        """The most tokens a sequence may have. Raises ValueError if the checkpoint does not say."""
        most = self._config.get("max_position_embeddings")
        if most is None:
            file = self.checkpoint / "config.json"
            raise ValueError(f"{file}: max_position_embeddings: missing; the context is needed")
        return int(most)

    @cached_property
    def vocab_size(self) -> int:
        """Token ids are below this: the larger of the model's and the tokenizer's count."""
        return max(int(self._config.get("vocab_size", 0)), self._backend.get_vocab_size())

    @property
    def model_vocab(self) -> int:
        """Ids that the model itself has are below this."""
        return int(self._config.get("vocab_size", self.vocab_size))

    @cached_property
    def eos(self) -> frozenset[int]:
        """The ids that end a reply, by the generation config, the config and the tokenizer."""
        generation = _read_json(self.checkpoint / "generation_config.json")
        settings = [
            self._config.get("eos_token_id"),
            generation.get("eos_token_id"),
            self._named_token("eos_token"),
        ]
        lists = (ids if isinstance(ids, list) else [ids] for ids in settings)
        return frozenset(i for ids in lists for i in ids if isinstance(i, int))

    @cached_property
    def end(self) -> int:
        """The id that ends a reply, of several its tokenizer's. Raises ValueError if none does."""
        if not self.eos:
            raise ValueError(f"{self.checkpoint}: names no token that ends a reply; one is needed")
        token = self._named_token("eos_token")
        return min(self.eos) if token is None else token

    @cached_property
    def bos(self) -> int | None:
        """The id of the token that begins a text; None if the tokenizer names none."""
        return self._named_token("bos_token")

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of tokens that are not text."""
        return frozenset(i for i, token in self._added.items() if token.special) | self.eos

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of each id amid other text; for special tokens their names."""
        spell = spell_byte_level if '"ByteLevel"' in self._decoder else spell_sentencepiece
        pieces = [
            self._added[i].content.encode()
            if i in self._added
            else spell(self._backend.id_to_token(i) or "")
            for i in range(self._backend.get_vocab_size())
        ]
        return (*pieces, *[b""] * (self.vocab_size - len(pieces)))

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for in a text; empty for a special token."""
        return self._bytes((token,))

    def spelling(self, token: int) -> bytes:
        """The bytes that a token stands for; for a special token its name."""
        return self.pieces[token]

    def another(self) -> Text:
        """A copy for another thread: a tokenizer may be used by one thread at a time."""
        return Text(self.checkpoint)

    def plain(self, words: str) -> str:
        """``words`` marked so that anything in them that looks like a control token is encoded as
        text. Words without such parts stay unchanged."""
        if self._controls is None:
            return words
        if self._backend.normalizer is not None:
            normal = self._backend.normalizer.normalize_str(words)
            if len(self._controls.findall(normal)) > len(self._controls.findall(words)):
                words = normal  # wide letters, for example, which the tokenizer normalises
        parts, at = [], 0
        while match := self._controls.search(words, at):
            parts.append(words[at : match.start() + 1])
            at = match.start() + 1  # another one may begin within this one
        return _BREAK.join([*parts, words[at:]])

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` alone, without begin or end tokens."""
        first, *more = text.split(_BREAK)
        ids = self._backend.encode(first, add_special_tokens=False).ids
        return ids + [token for part in more for token in self.encode_after(part)]

    def encode_after(self, text: str) -> list[int]:
        """The ids of ``text`` in the middle of a text: no space is put before its first word."""
        if not self._strips_first_space:
            return self.encode(text)
        anchored_ids, anchor = self.encode(_ANCHOR + text), len(self.encode(_ANCHOR))
        return anchored_ids[anchor:]

    def encode_prompt(self, text: str) -> list[int]:
        """``encode``; raises PrefixTooLong, before tokenising, for what cannot fit the context."""
        self._must_fit(text)
        return self.encode(text)

    def encode_step(self, words: str, delimiter: str) -> list[int]:
        """The ids of a step given as text, in the middle of a reply; a final delimiter is kept.

        Other control tokens are encoded as text. Raises PrefixTooLong, before tokenising.
        """
        self._must_fit(words)
        bare = words.removesuffix(delimiter)
        return self.encode_after(self.plain(bare) + words[len(bare) :])

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation rendered by the checkpoint's chat template, up to the assistant's reply.

        Templates that state today's date get a fixed one, because ids would change overnight.
        Contents from users must be passed through ``plain`` first. Raises ValueError without a
        template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.checkpoint}: has no chat template; one is needed")
        rendered = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tokenize=False,
            add_generation_prompt=True,
            date_string=_DATE,
        )
        return cast("str", rendered)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        open_reply: bool = False,
        tools: Tools | None = None,
    ) -> list[int]:
        """The ids of a conversation, ready for the assistant's reply; ``open_reply``: ready for the
        rest of its last message; ``tools``: the functions that the model may call.

        The checkpoint's chat template renders it; without one, as for base models, it is the
        contents, each followed by a newline. Only the template's control tokens count. Raises
        PrefixTooLong, before tokenising, for what cannot fit the context, and ValueError for a
        template that changes the last message of an open reply.
        """
        for message in messages:
            self._must_fit(message["content"])
        messages = [
            {k: v if k == "role" else _with_words(v, self.plain) for k, v in m.items()}
            for m in messages
        ]
        if self.tokenizer.chat_template is None:
            prompt = "".join(f"{m['content']}\n" for m in messages)
            return self._framed(prompt[:-1] if open_reply else prompt)
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=_with_words(tools, self.plain),
            tokenize=False,
            add_generation_prompt=not open_reply,
            continue_final_message=open_reply,
        )
        self._must_fit(cast("str", rendered))
        first, *more = cast("str", rendered).split(_BREAK)
        ids = self.tokenizer(first, add_special_tokens=False, verbose=False)["input_ids"]
        return [*cast("list[int]", ids), *(t for part in more for t in self.encode_after(part))]

    @cached_property
    def tool_template(self) -> ToolTemplate:
        """What the chat template does with tools and their results."""
        if self.tokenizer.chat_template is None:
            return ToolTemplate(results=True)  # rendered like any content

        def render(messages: Messages, tools: Tools | None) -> str:
            text = self.tokenizer.apply_chat_template([*messages], tools=tools, tokenize=False)  # type: ignore[arg-type]
            return cast("str", text)

        return read_tool_template(render)

    def decode(self, tokens: Sequence[int], after: Sequence[int] = (), *, last: bool = True) -> str:
        """The text that ``tokens`` add after the ids ``after``, special tokens left out.

        With ``last`` False an incomplete character at the end is left to the next piece, so that
        joined pieces give the whole text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._tail(after))
        text = decoder.decode(self._bytes(tokens), final=last)
        return text if after or not self._strips_first_space else text.removeprefix(" ")

    def token(self, text: str) -> int | None:
        """The id of the one token that is exactly ``text``, alone; None if there is none."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else self._backend.token_to_id(text)

    def _framed(self, text: str) -> list[int]:
        """The ids of a text with the tokens that the tokenizer puts before and after it."""
        self._must_fit(text)
        if _BREAK not in text:
            return self._backend.encode(text).ids
        ids, anchor = self._backend.encode(_ANCHOR).ids, self.encode(_ANCHOR)
        at = next(i for i in range(len(ids)) if ids[i : i + len(anchor)] == anchor)
        return [*ids[:at], *self.encode(text), *ids[at + len(anchor) :]]

    def _must_fit(self, text: str) -> None:
        if self._most_bytes is None or len(text) <= self._most_bytes // _CHARACTER_BYTES:
            return
        size = len(text.encode(errors="ignore"))
        if size > self._most_bytes:
            raise PrefixTooLong(
                f"{size} bytes; {self._most_bytes} are more than the {self.context} tokens of the "
                "model's context can stand for"
            )

    @cached_property
    def _most_bytes(self) -> int | None:
        """Most bytes of a text that may fit the context; None if that is not known."""
        a_token = most_bytes_a_token(json.loads(self._backend.to_str()), self.pieces)
        return None if a_token is None else a_token * self.context

    @cached_property
    def _controls(self) -> re.Pattern[str] | None:
        """Finds what looks like a control token: one that the tokenizer calls special, one that
        ends a reply, or an added one that begins with a bracket or that the chat template
        writes."""
        spellings = {
            token.content
            for i, token in self._added.items()
            if token.special
            or i in self.eos
            or token.content[:1] in _BRACKETS
            or token.content in self._template
        }
        names = sorted((n for n in spellings - _THOUGHTS if len(n) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _template(self) -> str:
        """The stored chat template or templates, read without the tokenizer, which takes seconds to
        load."""
        stored = self.checkpoint / "chat_template.jinja"
        apart = stored.read_text(encoding="utf-8") if stored.is_file() else ""
        config = _read_json(self.checkpoint / "tokenizer_config.json")
        return apart + str(config.get("chat_template") or "")

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[t] for t in tokens if t not in self.special)

    def _tail(self, tokens: Sequence[int]) -> bytes:
        """The last bytes of a text, enough to hold an incomplete character."""
        tail = b""
        for token in reversed(tokens):
            if len(tail) >= _CHARACTER_BYTES:
                break
            tail = self._bytes((token,)) + tail
        return tail

    def _named_token(self, token: str) -> int | None:
        """The id of a token that ``tokenizer_config.json`` names; None if it names none."""
        setting = _read_json(self.checkpoint / "tokenizer_config.json").get(token)
        name = setting.get("content") if isinstance(setting, dict) else setting
        return None if name is None else self._backend.token_to_id(name)

    @cached_property
    def _backend(self) -> Tokenizer:
        stored = self.checkpoint / "tokenizer.json"
        if stored.is_file():
            return Tokenizer.from_file(str(stored))
        return cast(Tokenizer, self.tokenizer.backend_tokenizer)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _strips_first_space(self) -> bool:
        return '"Metaspace"' in self._decoder or '"Strip"' in self._decoder

    @cached_property
    def _decoder(self) -> str:
        """The decoder's part of ``tokenizer.json``, which says how tokens become text."""
        return json.dumps(json.loads(self._backend.to_str())["decoder"])


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file's content; empty for a file that is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _with_words(value: Any, change: Callable[[str], str]) -> Any:
    """A message or a tool with ``change`` applied to all its texts, but not to field names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_words(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(part, change) for part in value]
    return value
