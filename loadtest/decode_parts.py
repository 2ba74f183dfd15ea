"""Where does the time of a decode iteration go, and of a pass of the reward model?

`python -m loadtest.decode_parts [--json]`. One thread; its own processor time, so that other work
on the machine adds little. Policy: every sequence draws its next token after a context of 100, of
which 32 are shared. Reward model: every sequence adds a step of 16 tokens to such a context.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np

from loadtest.engine import Decoding
from loadtest.searches import SPRIG
from runtime.embedded.choices import Kernel
from runtime.embedded.model import forward as passes
from runtime.embedded.model.attention import Attention, NativeAttention
from runtime.embedded.model.forward import Forward
from runtime.embedded.sampler import sample

SEQUENCES = (1, 4, 8, 16, 32, 64, 256)
SCORED = (1, 4, 8, 16, 64)
STEP = 16
PARTS = {
    "plan": [(passes, "build_plan")],
    "buffers": [(passes._Pass, "__init__")],
    "products": [(passes, "product")],
    "attention": [(NativeAttention, "run"), (Attention, "run")],
    "norms": [(passes.NativeRows, "normalise"), (passes.TorchRows, "normalise")],
    "heads": [(passes.NativeRows, "project"), (passes.TorchRows, "project")],
}
"""What is timed of a pass: where functions are looked up, and their names there."""


@contextmanager
def timed(parts: Mapping[str, Sequence[tuple[Any, str]]]) -> Iterator[dict[str, float]]:
    """Seconds spent in each of the ``parts`` while this lasts."""
    spent: dict[str, float] = defaultdict(float)
    places = [(part, *place) for part, found in parts.items() for place in found]
    originals = [getattr(owner, name) for _, owner, name in places]

    def wrapped(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            before = time.thread_time()
            try:
                return original(*args, **named)
            finally:
                spent[part] += time.thread_time() - before

        return call

    for (part, owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, wrapped(part, original))
    try:
        yield spent
    finally:
        for (_, owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def lower_quartile(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of processor time that a call takes when little comes between."""
    taken = []
    for _ in range(repeats + 1):
        before = time.thread_time()
        call()
        taken.append(time.thread_time() - before)
    return 1e3 * sorted(taken[1:])[repeats // 4]


def row(model: str, sequences: int, call: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Milliseconds of a call and of its parts."""
    whole = lower_quartile(call, repeats)
    with timed(PARTS) as spent:
        for _ in range(repeats):
            call()
    parts = {part: round(1e3 * spent[part] / repeats, 2) for part in PARTS}
    return {"model": model, "sequences": sequences, "ms": round(whole, 2)} | parts


def decode_rows(forward: Forward, repeats: int) -> Iterator[dict[str, Any]]:
    """The policy's iterations, with what their draws take."""
    for n in SEQUENCES:
        decoding = Decoding(forward, n)
        logits = forward.run(decoding.spans, decoding.store)
        seeds, places = np.arange(n, dtype=np.uint64), np.full(n, 100)
        found = row("policy", n, decoding.step, repeats)
        drawn = lower_quartile(lambda x=logits, s=seeds, p=places: sample(x, s, p), repeats)
        yield found | {"draws": round(drawn, 2)}


def scoring_rows(forward: Forward, repeats: int) -> Iterator[dict[str, Any]]:
    """The reward model's passes over a step of every sequence."""
    for n in SCORED:
        decoding = Decoding(forward, n)
        spans = [
            passes.Span(np.repeat(s.tokens, STEP), s.start + 1 - STEP, s.slots, STEP - 1)
            for s in decoding.spans
        ]
        store = decoding.store
        yield row("reward model", n, lambda x=spans, y=store: forward.run(x, y), repeats)


def report(repeats: int, kernel: Kernel = "auto") -> list[dict[str, Any]]:
    """A row for each model and number of sequences. ``kernel``: what attends."""
    assert SPRIG.prm is not None, "the bundled reward model is named"
    paths = SPRIG.policy, SPRIG.prm
    policy, prm = (Forward(path, threads=1, kernel=kernel) for path in paths)
    return [*decode_rows(policy, repeats), *scoring_rows(prm, max(3, repeats // 3))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    kernels = get_args(Kernel)
    parser.add_argument("--kernel", choices=kernels, default="auto", help="what attends")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    rows = report(options.repeats, options.kernel)
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for found in rows:
        print("  ".join(f"{key} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
