"""Image transforms as functions: any name can be imported, none can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"torchvision.transforms.functional.{name}: not on this machine")

    return missing
