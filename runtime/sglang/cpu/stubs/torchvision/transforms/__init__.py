"""Image transforms: any name can be imported, none can be used."""

from __future__ import annotations

import enum


class InterpolationMode(enum.Enum):
    """How an image would be scaled."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    class Missing:
        def __init__(self, *_: object, **__: object) -> None:
            raise NotImplementedError(f"torchvision.transforms.{name}: not on this machine")

    return Missing
