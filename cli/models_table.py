"""``hedgerow config models``: tables of the public models that are known by name."""

from __future__ import annotations

from models.catalog import public_policies, public_reward_models
from runtime.embedded.model.config import ARCHITECTURES
from runtime.profiles import PROFILES
from runtime.reward_format import REWARD_FORMATS, RewardFormat

READS = {
    "softmax": "P(`{good}`) against `{bad}`",
    "mean": "sigmoid of the mean logit",
    "value": "sigmoid of `{head}`",
    "classes": "class {label} of `{head}`",
}


def models_table() -> str:
    """The tables of policy models and of reward models, in Markdown."""
    policies = [
        "| policy model | class | profile | a search's system message | engines | license |",
        "|---|---|---|---|---|---|",
    ]
    for row in public_policies():
        system = (PROFILES[row.profile].system or "").partition("\n")[0]
        policies.append(
            f"| {_names(row.names)} | `{row.architecture}` | `{row.profile}` | {system} | "
            f"{_engines(row.architecture)} | {row.license} |"
        )
    rewards = [
        "| reward model | class | format | tag | reward | engines | license |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in public_reward_models():
        form = REWARD_FORMATS[row.format]
        rewards.append(
            f"| {_names(row.names)} | `{row.architecture}` | `{row.format}` | {_tag(form)} | "
            f"{_reads(form)} | {_engines(row.architecture)} | {row.license} |"
        )
    return "\n".join([*policies, "", *rewards]) + "\n"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _engines(architecture: str) -> str:
    return "both" if architecture in ARCHITECTURES else "SGLang"


def _tag(form: RewardFormat) -> str:
    if form.spells == "dialogue":
        return "each step a turn"
    if form.outcome:
        return "the finished reply"
    return "newline" if form.tag == "\n" else f"`{form.tag}`"


def _reads(form: RewardFormat) -> str:
    words = {"good": form.good, "bad": form.bad, "label": form.label, "head": ", ".join(form.head)}
    return READS[form.reads].format(**words)
