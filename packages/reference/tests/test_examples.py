"""Every example in the package's docstrings and in its README runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import sparse_mla_reference

MODULES = [
    "sparse_mla_reference",
    *(
        m.name
        for m in pkgutil.walk_packages(sparse_mla_reference.__path__, "sparse_mla_reference.")
    ),
]
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme(capsys):
    """Its blocks share one namespace, top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), namespace)
    said = re.search(r"print\(.*\)  # ([\d.]+)", README.read_text())
    assert said
    assert round(float(capsys.readouterr().out.split()[0]), 5) == float(said[1])


def test_public_functions_say_what_they_do():
    """Every public function and class of every module has a docstring; those that take arrays name
    the errors that they raise."""
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__doc__, name
        for key, value in vars(module).items():
            public = not key.startswith("_") and getattr(value, "__module__", None) == name
            assert not public or value.__doc__, f"{name}.{key}"
