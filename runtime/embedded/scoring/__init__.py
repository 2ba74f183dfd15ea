"""Rewards and embeddings of steps, and the policy as judge."""
