"""`--kv-theta`: how the engine uses a file of coefficients, and refuses a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.value import UNFITTED, Theta, save_theta
from runtime.embedded.choices import KvPolicy
from runtime.embedded.eviction import EVICTORS, VALUE_PARAMS, ValueParams
from runtime.embedded.options import EngineOptions
from runtime.embedded.radix_tree import RadixTree

ALL_SIGNALS = Path("tests/kvpolicy/all_signals.json")


def test_without_a_file_the_value_decides_alone() -> None:
    """Without a file only the value counts; ``attention`` turns on reading attention."""
    assert EngineOptions("policy").value_params() == VALUE_PARAMS
    assert VALUE_PARAMS.theta.signals == "v"
    assert EngineOptions("policy", attention=True).value_params() == VALUE_PARAMS._replace(
        attends=True
    )


def test_a_file_is_what_blocks_are_valued_by() -> None:
    """The file's coefficients are used with the engine's constants."""
    assert EngineOptions("policy", kv_theta=ALL_SIGNALS).value_params() == ValueParams(UNFITTED)


@pytest.mark.parametrize(
    ("policy", "worth", "attends"),
    [
        ("arborkv", VALUE_PARAMS, False),
        ("arborkv", ValueParams(UNFITTED.only("vu")), False),
        ("arborkv", ValueParams(UNFITTED.only("va")), True),
        ("arborkv", VALUE_PARAMS._replace(attends=True), True),
        ("lru", ValueParams(UNFITTED), False),
        ("full", ValueParams(UNFITTED), False),
    ],
)
def test_attention_is_read_where_it_counts_alone(
    policy: KvPolicy, worth: ValueParams, attends: bool
) -> None:
    """Attention, which costs a little at every step's end, is read only if the policy uses it."""
    assert EVICTORS[policy](RadixTree(), 100, worth).attends is attends


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["No such file or directory", "hedgerow calibrate"]),
        ("{", ["not JSON"]),
        ("{}", ["schema: None; 1 is needed"]),
        (b"\xff\xfe", ["codec can't decode", "hedgerow calibrate"]),
    ],
)
def test_a_wrong_file_is_one_clear_error(
    tmp_path: Path, text: str | bytes | None, words: list[str]
) -> None:
    """The error names the setting and the file."""
    path = tmp_path / "theta.json"
    if isinstance(text, str):
        path.write_text(text)
    elif text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match="kv_theta: ") as error:
        EngineOptions("policy", kv_theta=path)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_coefficients_of_the_extractive_mode_are_refused(tmp_path: Path) -> None:
    """Mode "paper" estimates a block's accuracy, not re-entry, so it is refused here."""
    path = tmp_path / "theta.json"
    save_theta(Theta("paper", {"": (0.0,)}), path)
    with pytest.raises(ValueError, match="mode: 'paper'; 'exact' is needed with kv_policy 'arbor"):
        EngineOptions("policy", kv_theta=path)
