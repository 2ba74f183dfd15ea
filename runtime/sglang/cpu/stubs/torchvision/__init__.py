"""Stands in for ``torchvision``, whose published wheel needs CUDA: SGLang imports its names."""

__version__ = "0.0.0"
