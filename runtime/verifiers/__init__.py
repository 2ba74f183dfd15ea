"""Verifiers of one's own: a Python function or an HTTP endpoint that the operator names."""
