"""The engine over any servers with OpenAI's completions API, mainly vLLM."""
