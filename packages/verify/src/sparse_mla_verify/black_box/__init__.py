"""A kernel of which only the answers are known: what its conventions are."""
