"""Faults planted on purpose, and whether the checks catch them."""
