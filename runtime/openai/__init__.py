"""The engine over any server that speaks OpenAI's completions, vLLM first."""
