"""Paper mode: ArborKV as published and its lossy peers. KV is private to its tree."""
