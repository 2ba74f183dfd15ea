"""Engines on servers that run elsewhere: routing searches to them, and watching their health."""
