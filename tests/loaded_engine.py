"""Tests' engine processes are forked from this module: torch is loaded once, not once for each.

Otherwise they start like spawned ones. Servers that are started as separate processes spawn
their engines as usual.
"""

from runtime.embedded.embedded_engine import let_threads_rest

let_threads_rest()

import runtime.embedded.engine_loop  # noqa: E402, F401
