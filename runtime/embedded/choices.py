"""The embedded engine's settings that take one of a few names, each with all its names.

The module that acts on a setting maps its names to code, for example ``eviction.EVICTORS``.
"""

from typing import Literal

KvPolicy = Literal["full", "lru", "arborkv"]
"""``eviction.EVICTORS``: which KV of the policy model is evicted first."""

KvSplitMode = Literal["given", "even", "roofline"]
"""``kv_split``: each pool as it is set; half of all bytes for each pool; the split that takes the
least time (FlashTTS, section 4.3.1), by peaks measured at the start."""

DraftMode = Literal["off", "serial", "scheduled"]
"""``speculative_decoding``: no drafts; for one sequence at a time; for all that are ready."""

ScheduleOrder = Literal["prefix", "fcfs", "random"]
"""``queues.SCHEDULE_ORDERS``: the order in which a round's branches are admitted."""

Kernel = Literal["auto", "native", "torch"]
"""What computes between matrix products: the compiled library if available, else torch; only the
compiled library; only torch."""

EmbedderName = Literal["hidden", "lexical", "encoder", "endpoint"]
"""What embeds steps: the policy's hidden states, the text's letters, a checkpoint, a server."""
