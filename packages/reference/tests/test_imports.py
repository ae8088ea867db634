"""The package stands on numpy and ml_dtypes alone, and an import builds no table."""

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

TABLES = """
import sys
sys.path.insert(0, {source!r})
import sparse_mla_reference
found = {{
    module + "." + name: function.cache_info().currsize
    for module, loaded in list(sys.modules.items())
    if module.startswith("sparse_mla_reference")
    for name, function in vars(loaded).items()
    if hasattr(function, "cache_info")
}}
print(len(found) > 0, sum(found.values()))
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", code.format(source=str(SOURCE))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_only_numpy_and_ml_dtypes():
    assert run(ROOTS) == "[]"


def test_an_import_builds_no_table():
    """The tables of formats and instructions are built when they are first used."""
    assert run(TABLES) == "True 0"
