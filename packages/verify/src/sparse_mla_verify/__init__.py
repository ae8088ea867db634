"""Differential tests, recordings, claims and the audit of a sparse MLA decode kernel.

Importing the package imports neither PyTorch nor the DSL: the rooms `inputs`, `measure` and
`evidence` need the reference alone, and `gpu_runs` the kernel.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("sparse-mla-verify")
except _metadata.PackageNotFoundError:  # The source is on the path, and the package not installed.
    __version__ = "0+unknown"
