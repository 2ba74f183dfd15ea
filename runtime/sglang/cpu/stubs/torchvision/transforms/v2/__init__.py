"""The newer interface: the same names."""

from torchvision.transforms import InterpolationMode, __getattr__
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "__getattr__", "functional"]
