"""Differential tests, recordings, claims and the audit of a sparse MLA decode kernel.

Importing the package imports neither PyTorch nor the DSL: `cases`, `compare`, `runs`, `predict`
and `recordings` need the reference alone, and `gpu` and `structure` the kernel.
"""

__version__ = "0.1.0"
