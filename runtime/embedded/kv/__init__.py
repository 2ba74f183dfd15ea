"""The cache: which tokens have keys and values, where, and which of them go first."""
