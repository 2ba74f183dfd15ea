"""The settings of the embedded engine that are one of a few names, each with all of its names.

What a name stands for is an entry where the choice is made, such as in ``eviction.EVICTORS``.
"""

from typing import Literal

KvPolicy = Literal["full", "lru", "arborkv"]
"""``eviction.EVICTORS``: what the policy model's KV gives up first."""

KvSplitMode = Literal["given", "even", "roofline"]
"""``kv_split``: each pool as it is set; half of the bytes of both each; what takes least time
(FlashTTS, section 4.3.1), by peaks measured at the start."""

DraftMode = Literal["off", "serial", "scheduled"]
"""``speculative_decoding``: no draft; one sequence's at a time; those of all that are ready."""

ScheduleOrder = Literal["prefix", "fcfs", "random"]
"""``queues.SCHEDULE_ORDERS``: in which a round's branches are admitted."""

Kernel = Literal["auto", "native", "torch"]
"""What computes between products: the compiled library where it can be had, it and nothing else, or
torch."""

EmbedderName = Literal["hidden", "lexical", "encoder", "endpoint"]
"""What embeds steps: the policy's hidden states, letters alone, a checkpoint, a server."""
