"""Checks whether a SGLang server is the one needed, by what it says about itself and by the files
it names if they can be read here. Nothing is drawn or scored for that: an embedding server asked
for a verdict crashes, and so does a server that reads an id it does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from hedgerow_sglang.plugin_protocol import plugin_counts
from runtime.checkpoint import LANGUAGE, Checkpoint, outputs_of_class
from runtime.reward_format import REWARD_FORMATS, RewardFormat
from runtime.text import Text

Json = Mapping[str, Any]

PROBE = "Is it so?\n\n12,345 + 6 = 12,351 (x_1, 'naïve'): Σ of ten SENTENCES of words, ки 好."
"""The text that a server's tokenizer is asked to encode if its files cannot be read."""
PROBED = 0.75
"""The share of its ids that is compared, from the end: tokenizers differ in how texts begin."""
RESERVED_TOKENS = 16
"""An upper bound of the context's tokens that SGLang reserves for itself."""
COMPARED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself: ``/server_info``, ``/model_info`` (empty if it has none) and
    the ids of ``PROBE`` by ``/tokenize`` (None: not asked, or no answer)."""

    server: Json
    model: Json = field(default_factory=dict)
    ids: Sequence[int] | None = None

    @property
    def embeds(self) -> bool | None:
        """Whether it gives embeddings instead of text; None if it does not say."""
        generates = self.model.get("is_generation")
        return self.server.get("is_embedding") if generates is None else not generates

    @property
    def architecture(self) -> str | None:
        """The name of its model's class; None if it does not say."""
        return (self.model.get("architectures") or [None])[0]

    @property
    def model_path(self) -> str | None:
        """Its model's path, as given when it was started."""
        return self.model.get("model_path") or self.server.get("model_path")

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Its model's folder, or the hub's cache of it on this machine; None if neither is here."""
        return _readable(self.model_path)

    @cached_property
    def tokenizer(self) -> Checkpoint | None:
        """The same for its tokenizer."""
        path = self.model.get("tokenizer_path") or self.server.get("tokenizer_path")
        return _readable(path or self.model_path)


def _readable(path: str | None) -> Checkpoint | None:
    if path is None:
        return None
    folder = Path(path)
    if not (folder / "config.json").is_file():
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:  # a path, not a name on the hub
            return None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return Checkpoint.of(folder)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome, in sentences. ``wrong``: why a server cannot be used; ``unknown``: what could
    not be compared; ``notes``: drawbacks of a server that can be used."""

    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpectedServer:
    """What the servers of a kind must be: ``text`` of their model's folder, and the reward format
    ``form`` of reward servers, None for the policy's."""

    kind: Literal["policy", "reward"]
    text: Text
    form: RewardFormat | None = None

    @property
    def setting(self) -> str:
        """The command line's option for the model's folder."""
        return "--model" if self.kind == "policy" else "--reward-model"

    @property
    def classifies(self) -> bool:
        """Whether it must be an embedding server."""
        return self.form is not None and self.form.reads_hidden

    def spelt(self) -> list[int]:
        """The ids of ``PROBE``, which a server's tokenizer must give too."""
        return self.text.encode(PROBE)

    def asks_tokenizer(self, info: ServerInfo) -> bool:
        """Whether the server's own tokenizer must be asked, because its files do not suffice."""
        tokenizer = info.tokenizer
        if info.server.get("skip_tokenizer_init"):
            return False
        return tokenizer is None or self._checkpoint.same_tokenizer(tokenizer) is None

    def compare(self, info: ServerInfo) -> Comparison:
        """Compare a server with what is needed. Reads files."""
        wrong = [*self._kind(info), *self._options(info)]
        differences, unknown = self._model(info)
        if differences:
            wrong.append(
                f"it serves another model ({info.model_path}) than {self.setting} "
                f"{self.text.checkpoint}: {', '.join(differences)}; start it with --model-path "
                f"{self.text.checkpoint}, or name the served model's folder by {self.setting}"
            )
        if self.classifies and info.embeds is not False:
            outputs, architecture = self._outputs(info)
            wrong += self.head_faults(outputs, architecture)
            if outputs is None:
                unknown.append("the head's outputs")
        return Comparison(tuple(wrong), tuple(unknown), tuple(self._notes(info)))

    def head_faults(self, outputs: int | None, architecture: str | None) -> Iterator[str]:
        """What is wrong with a head of ``outputs`` outputs; nothing if that is None."""
        form = self.form
        if form is None or not form.reads_hidden or outputs is None:
            return
        if (architecture or "").endswith(LANGUAGE):
            yield (
                f"{architecture} has no reward head, only hidden states; reward format "
                f"{form.name!r} reads a head's outputs: serve a reward model, or take a reward "
                f"format that reads verdicts ({_formats(hidden=False)}) and no --is-embedding"
            )
        elif form.reads == "value" and outputs != 1:
            yield (
                f"its head has {outputs} outputs, reward format {form.name!r} reads one; take a "
                f"format that reads several, such as qwen2.5-math-prm, or serve another model"
            )
        elif form.reads == "classes" and outputs <= max(1, form.label):
            yield (
                f"its head has {outputs} output{'s' * (outputs != 1)}, reward format {form.name!r} "
                f"reads class {form.label} of several; take a format that reads one, such as "
                "skywork, or serve another model"
            )

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.of(self.text.checkpoint)

    def _kind(self, info: ServerInfo) -> Iterator[str]:
        if info.embeds is None or info.embeds == self.classifies:
            return
        name = self.form.name if self.form else ""
        if self.classifies:
            yield (
                f"it is a generation server, reward format {name!r} reads the outputs of a head; "
                "start it with --is-embedding, or take a reward format that reads verdicts "
                f"({_formats(hidden=False)})"
            )
        elif self.form is not None:
            yield (
                f"it is an embedding server (--is-embedding), reward format {name!r} reads "
                "log-probabilities of a generation server; start it without --is-embedding, or "
                f"take a reward format that reads a head ({_formats(hidden=True)})"
            )
        else:
            yield "it is an embedding server, which draws nothing; start it without --is-embedding"

    def _options(self, info: ServerInfo) -> Iterator[str]:
        """Faults in the options it was started with, which would change or prevent draws."""
        server = info.server
        if server.get("disaggregation_mode") not in (None, "null"):
            yield (
                f"it does {server['disaggregation_mode']} alone; start it without "
                "--disaggregation-mode"
            )
        if self.kind == "policy" and server.get("skip_tokenizer_init"):
            yield "it cannot find strings that end steps; start it without --skip-tokenizer-init"
        if self.kind == "policy" and server.get("preferred_sampling_params"):
            yield (
                f"it samples by {server['preferred_sampling_params']} beside what a search asks; "
                "start it without --preferred-sampling-params"
            )

    def _notes(self, info: ServerInfo) -> Iterator[str]:
        most, context = info.server.get("max_req_input_len"), self.text.context
        if most and most + RESERVED_TOKENS < context:
            yield f"it takes {most} tokens of the model's context of {context}; searches end there"
        if info.server.get("enable_custom_logit_processor"):
            yield "it runs code that requests bring (--enable-custom-logit-processor)"
        if info.server.get("disable_radix_cache"):
            yield "it reads every prefix again (--disable-radix-cache)"

    def _model(self, info: ServerInfo) -> tuple[list[str], list[str]]:
        """How its model differs from ours, and what could not be compared."""
        ours, checkpoint = self._checkpoint, info.checkpoint
        different, unknown = [], []
        if info.architecture is None:
            unknown.append("the class")
        elif info.architecture != ours.architecture:
            different.append(f"class {info.architecture} instead of {ours.architecture}")
        if checkpoint is None:
            unknown.append(f"sizes, vocabulary, weights ({info.model_path} is not readable here)")
        elif not checkpoint.folder.samefile(ours.folder):
            different += [
                f"{name} {checkpoint.config.get(name)} instead of {ours.config.get(name)}"
                for name in COMPARED
                if checkpoint.config.get(name) != ours.config.get(name)
            ]
            if not different and ours.same_weights(checkpoint) is False:
                different.append("other weights")
        same = self._same_tokenizer(info)
        if same is None:
            unknown.append("the tokenizer")
        elif not same:
            different.append("another tokenizer")
        return different, unknown

    def _same_tokenizer(self, info: ServerInfo) -> bool | None:
        tokenizer = info.tokenizer
        same = None if tokenizer is None else self._checkpoint.same_tokenizer(tokenizer)
        if same is not None or info.ids is None:
            return same
        ours = self.spelt()
        last = int(PROBED * len(ours))
        return list(info.ids)[-last:] == ours[-last:]

    def _outputs(self, info: ServerInfo) -> tuple[int | None, str | None]:
        """The outputs of its head, and its model's class; None for what is not known."""
        checkpoint = info.checkpoint
        if checkpoint is not None:
            return checkpoint.head_outputs(), info.architecture or checkpoint.architecture
        if info.architecture is None:
            return None, None
        if info.architecture == self._checkpoint.architecture:
            return self._checkpoint.head_outputs(), info.architecture
        return outputs_of_class(info.architecture, {}), info.architecture


def changes(before: Json, now: Json) -> Iterator[str]:
    """Abilities that searches rely on and that a server lacks after it came back."""
    had, has = (plugin_counts(info) or {} for info in (before, now))
    for name, ability in (("seeds", "draws by seed"), ("evicts", "evicts by our plug-in")):
        if had.get(name) and not has.get(name):
            yield f"it {ability} no more; start it as before"
    longest, most = (info.get("max_req_input_len") for info in (before, now))
    if longest and most and most < longest:
        yield f"its context is {most} tokens now, {longest} before; start it as before"


def _formats(*, hidden: bool) -> str:
    """The names of the formats that read a head (``hidden``) or verdicts."""
    return ", ".join(
        form.name
        for form in REWARD_FORMATS.values()
        if (form.reads_hidden if hidden else form.reads == "softmax")
    )
