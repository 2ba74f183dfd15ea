"""Benchmarks, one question per module: `python -m loadtest.NAME`.

They share their options (`options`), taking turns (`turns`), intervals of pairs (`paired`),
results that are kept so that a run can go on (`kept`), tables and JSON (`report`), searches to grow
(`searches`), and servers to grow them on (`served`, `on_sglang`, `on_vllm`).
"""
