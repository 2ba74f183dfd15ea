"""Which settings each engine acts on. One that an engine would ignore is refused, not swallowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EMBEDDED = "--engine embedded"
LAUNCHED = "--engine sglang --launch"
RUNNING = "--engine sglang with --policy-url"

ACTED_ON_BY: Mapping[str, tuple[str, ...]] = {
    "kv_tokens": (EMBEDDED, LAUNCHED),
    "prm_kv_tokens": (EMBEDDED, LAUNCHED),
    "kv_policy": (EMBEDDED, LAUNCHED),
    "kv_theta": (EMBEDDED,),
    "kv_split": (EMBEDDED,),
    "kv_load": (EMBEDDED,),
    "batch_limit": (EMBEDDED,),
    "draft": (EMBEDDED,),
    "draft_model": (EMBEDDED,),
    "draft_rule": (EMBEDDED,),
    "draft_tokens": (EMBEDDED,),
    "k_config": (EMBEDDED,),
    "draft_kv_tokens": (EMBEDDED,),
    "verify_batch": (EMBEDDED,),
    "lookahead": (EMBEDDED,),
    "dedup": (EMBEDDED,),
    "order": (EMBEDDED,),
    "threads": (EMBEDDED,),
    "exact": (EMBEDDED,),
    "kernel": (EMBEDDED,),
    "embedder_layer": (EMBEDDED,),
    "models_file": (EMBEDDED,),
    "launch": (LAUNCHED,),
    "launch_python": (LAUNCHED,),
    "launch_device": (LAUNCHED,),
    "launch_memory": (LAUNCHED,),
    "policy_args": (LAUNCHED,),
    "reward_args": (LAUNCHED,),
    "policy_urls": (RUNNING,),
    "reward_urls": (RUNNING,),
}
"""Every other setting is acted on whatever the engine."""
OFF: Mapping[str, object] = {
    "draft": "off",
    "kv_split": "given",
    "lookahead": False,
    "dedup": False,
    "exact": False,
    "launch": False,
}
"""What any engine may be told, since it says what an engine without the setting does."""


def ignored_settings(engine: str, launch: bool, values: Mapping[str, Any]) -> dict[str, str]:
    """Of the settings that were set, ``values`` by name, those that the engine would not act on.

    Each with what is allowed.
    """
    way = EMBEDDED if engine == "embedded" else LAUNCHED if launch else RUNNING
    return {
        name: f"not acted on by {way}; leave it out, or take {' or '.join(ACTED_ON_BY[name])}"
        for name, value in values.items()
        if way not in ACTED_ON_BY.get(name, (way,))
        and value not in (None, ())
        and (name not in OFF or value != OFF[name])
    }
