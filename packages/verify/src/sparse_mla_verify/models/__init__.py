"""Models other than the reference: the same decode with one step changed."""
