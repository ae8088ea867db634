"""Patched copies of the kernel's package, for processes of their own that import the copy."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "sparse_mla_kernel"


def copied_package(folder: Path) -> Path:
    """Copy the kernel's package into `folder`, the path to import it from; the copy."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(f"{PACKAGE} must be importable to be patched, got no such package")
    copy = folder / PACKAGE
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def replaced(source: str, old: str, new: str, where: str) -> str:
    """A source with `new` for `old`. Raises ValueError when `old` isn't there exactly once."""
    if source.count(old) != 1:
        raise ValueError(f"{where} must have the line to patch once, got {source.count(old)} of it")
    return source.replace(old, new)


@dataclass(frozen=True)
class Change:
    """In `file`, `old` (found once) becomes `new`."""

    file: str
    old: str
    new: str


def change_files(copy: Path, changes: Iterable[Change]) -> None:
    """Make changes in the files of a copy. Raises ValueError as :func:`replaced`."""
    for change in changes:
        file = copy / change.file
        where = f"{change.file}: {change.old!r}:"
        file.write_text(replaced(file.read_text(), change.old, change.new, where))


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that imports what it does from `folder` first."""
    path = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    return {**os.environ, "PYTHONPATH": path}
