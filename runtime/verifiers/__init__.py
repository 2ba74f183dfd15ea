"""Verifiers that the operator names: a Python function or an HTTP endpoint."""
