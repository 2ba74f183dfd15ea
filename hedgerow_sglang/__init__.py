"""What runs inside SGLang's processes, and what Hedgerow shares with it: protocol and noise.

A distribution of its own, ``hedgerow-sglang`` (deploy/sglang-plugin/): it needs ``kvpolicy``, which
it brings along, NumPy and what SGLang has anyhow.
"""
