"""Code that runs inside SGLang's processes, and what Hedgerow shares with it: protocol and noise.

Published as its own distribution, ``hedgerow-sglang`` (deploy/sglang-plugin/). It needs NumPy,
``kvpolicy``, which it bundles, and what SGLang installs anyway.
"""
