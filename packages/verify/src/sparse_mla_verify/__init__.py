"""Differential tests, recordings, claims and the audit of a sparse MLA decode kernel.

Importing the package imports neither PyTorch nor the DSL: the rooms `inputs`, `measure` and
`evidence` need the reference alone, and `gpu_runs` the kernel.
"""

__version__ = "0.1.0"
