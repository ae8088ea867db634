"""Runs of the kernel on a GPU: the cases, repeated launches, guarded memory, the sanitizers."""
