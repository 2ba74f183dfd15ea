"""A larger target with the same distribution: `python -m models.deepen SOURCE FOLDER --layers 20`.

The added layers have zero output projections: they cost as much as other layers and add exactly
nothing to the residual stream, so the logits stay the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
SILENT = ("self_attn.o_proj.", "mlp.down_proj.")
"""The projections by which a layer adds to the residual stream."""


def deepen(source: Path, folder: Path, layers: int) -> None:
    """Write ``source``, a one-file safetensors checkpoint, to ``folder`` with ``layers`` layers.

    Raises ValueError for fewer layers than it has.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    depth = config["num_hidden_layers"]
    if layers < depth:
        raise ValueError(f"layers: {layers}; {source} has {depth}, and none can be taken away")
    tensors = load_file(source / WEIGHTS)
    first_layer = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.")}
    for number in range(depth, layers):
        for name, tensor in first_layer.items():
            part = name.removeprefix("model.layers.0.")
            silent = part.startswith(SILENT)
            weights = torch.zeros_like(tensor) if silent else tensor.clone()
            tensors[f"model.layers.{number}.{part}"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            shutil.copy(path, folder / path.name)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config | {"num_hidden_layers": layers}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Write a deeper checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkpoint's folder")
    parser.add_argument("folder", type=Path, help="where the deeper one goes")
    parser.add_argument("--layers", type=int, required=True, help="in all")
    options = parser.parse_args()
    try:
        deepen(options.source, options.folder, options.layers)
    except ValueError as error:
        raise SystemExit(f"--{error}") from None


if __name__ == "__main__":
    main()
