"""The package stands on numpy and ml_dtypes alone, and imports fast."""

import subprocess
import sys
from pathlib import Path

import sparse_mla_reference

SOURCE = Path(sparse_mla_reference.__file__).parents[1]

ROOTS = """
import importlib, pkgutil, sys
sys.path.insert(0, {source!r})
before = set(sys.modules)
import numpy, ml_dtypes
import sparse_mla_reference as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
allowed = sys.stdlib_module_names | {{"numpy", "ml_dtypes", "sparse_mla_reference"}}
# Compiled helpers of the two packages register under names of their own.
print(sorted(r for r in roots - allowed if not r.startswith(("_cython", "cython_runtime"))))
"""

TIME = """
import sys, time
import numpy, ml_dtypes
sys.path.insert(0, {source!r})
start = time.perf_counter()
import sparse_mla_reference
print(time.perf_counter() - start)
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", code.format(source=str(SOURCE))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_only_numpy_and_ml_dtypes():
    assert run(ROOTS) == "[]"


def test_import_is_fast():
    """Beyond numpy's own import; the best of three, as a loaded machine only adds."""
    assert min(float(run(TIME)) for _ in range(3)) < 0.3
