"""Labelled trajectories out of searched trees: what a search follows, its mistakes included.

`hedgerow eval --task blocksworld --split train --policy rebase --width 64 --trees FILE`, then
`python -m models.train.tree_data FILE...` adds them to the cache. A wide search fools a
reward model that never saw what such a search selects.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from models.tasks import TASKS
from models.train.batches import load_tokenizer
from models.train.checkpoint import CACHE
from models.train.labelled import Labelled, label_steps
from models.train.prm_data import SAMPLES
from search.tree import Node, Tree
from search.tree_json import from_json

FOOLED, TRUSTED, OTHERS = 6, 3, 5
"""Leaves from each tree: the wrong and the right ones of highest reward, others at random."""


def instructive(rows: list[tuple[float, Labelled]], rng: random.Random) -> list[Labelled]:
    """The leaves that teach most: trusted though wrong, trusted and right, and some others."""
    ranked = sorted(rows, key=lambda row: -row[0])
    wrong = [row for _, row in ranked if not row.labels[-1]][:FOOLED]
    right = [row for _, row in ranked if row.labels[-1]][:TRUSTED]
    top_rows = [*wrong, *right]
    others = [row for _, row in ranked if not any(row is top_row for top_row in top_rows)]
    return [*top_rows, *rng.sample(others, min(OTHERS, len(others)))]


def leaves_of(tree: Tree) -> Iterator[Node]:
    """The scored nodes without children, one for equal steps."""
    paths: set[tuple[tuple[int, ...], ...]] = set()
    for node in tree.nodes[1:]:
        if node.children or node.reward is None:
            continue
        key = tuple(step.tokens for step in tree.chain(node.id))
        if key not in paths:
            paths.add(key)
            yield node


def rows_of(
    document: dict, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> list[Labelled]:
    """The labelled trajectories of one line of `--trees`."""
    tree, task = from_json(document["tree"]), TASKS[document["task"]]
    rows = []
    for leaf in leaves_of(tree):
        steps = [list(node.tokens) for node in tree.chain(leaf.id)]
        row = label_steps(tokenizer, task, document["question"], steps)
        rows.append((leaf.reward or 0.0, row))
    return instructive(rows, rng)


def main() -> None:
    """Add the trees of some files to the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--name", default="trees", help="which file of samples to add to")
    options = parser.parse_args()
    tokenizer, rng, count = load_tokenizer(), random.Random(options.name), 0
    with (CACHE / SAMPLES.replace("*", options.name)).open("a") as out:
        for path in options.files:
            for line in path.open():
                rows = rows_of(json.loads(line), tokenizer, rng)
                out.writelines(json.dumps(row) + "\n" for row in rows)
                count += len(rows)
    print(json.dumps({"rows": count}))


if __name__ == "__main__":
    main()
