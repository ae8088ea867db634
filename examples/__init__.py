"""Worked examples: other people's kernels, predicted with the parts of the reference."""
