"""Token eviction: ArborKV's extractive mode and its baselines. KV is private to its tree."""
