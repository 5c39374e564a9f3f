"""Bringing objects into memory from somewhere below it: lower tiers, and other servers."""
