"""Rounds of branches drawn token by token, those of all searches through one batch."""
