"""What the engine processes of tests are forked from: torch is loaded once a run, not once each.

They begin like spawned ones otherwise. Servers that are started as processes of their own spawn
their engines as ever.
"""

from runtime.embedded.embedded_engine import let_threads_rest

let_threads_rest()

import runtime.embedded.engine_loop  # noqa: E402, F401
