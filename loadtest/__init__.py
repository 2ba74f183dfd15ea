"""Benchmarks, a question a module: `python -m loadtest.NAME`.

What they share: their options (`options`), taking turns (`turns`), intervals of pairs (`paired`),
results that are kept for a run that goes on (`kept`), tables and JSON (`report`), searches to grow
(`searches`), and servers to grow them on (`served`, `on_sglang`, `on_vllm`).
"""
