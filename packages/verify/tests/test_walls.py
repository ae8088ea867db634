import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_mla_kernel.kernels.base.layout as base_layout
import sparse_mla_kernel.schedule as kernel_schedule
import sparse_mla_reference.schedule as reference_schedule
from sparse_mla_reference.instructions.tensor_core import SM90_E4M3
from sparse_mla_verify.inputs import cases

FORBIDDEN = {
    "sparse_mla_reference": {"sparse_mla_kernel", "sparse_mla_verify", "torch", "cutlass"},
    "sparse_mla_kernel": {"sparse_mla_reference", "sparse_mla_verify"},
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_imports_across_a_wall(package):
    (home,) = importlib.import_module(package).__path__
    folder = Path(home)
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 5
    across = {p.name: set(imports_of(p)) & FORBIDDEN[package] for p in files}
    assert {name: found for name, found in across.items() if found} == {}


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("sparse_mla_reference", ("sparse_mla_kernel", "sparse_mla_verify", "torch", "cutlass")),
        ("sparse_mla_kernel", ("sparse_mla_reference", "sparse_mla_verify")),
        ("sparse_mla_verify.measure.predict", ("sparse_mla_kernel", "torch", "cutlass")),
        ("sparse_mla_verify.__main__", ("sparse_mla_kernel", "torch", "cutlass")),
    ],
)
def test_a_package_imports_with_the_others_blocked(package, absent):
    block = "".join(f"sys.modules[{name!r}] = None; " for name in absent)
    code = f"import sys; {block}import {package}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_both_schedules_agree():
    ours, theirs = kernel_schedule.BASE, reference_schedule.BASE
    for name in ("split", "chunk", "qk_chains"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert SM90_E4M3.step == base_layout.MMA_K


def test_all_layers_agree_on_the_columns():
    assert kernel_schedule.ROW_COLUMNS == reference_schedule.ROW == cases.COLUMNS
    assert kernel_schedule.LATENT_COLUMNS == reference_schedule.LATENT == cases.LATENT
    assert kernel_schedule.TILE_HEADS == cases.HEAD_TILE


def test_all_packages_have_one_version():
    names = ("sparse_mla_reference", "sparse_mla_kernel", "sparse_mla_verify")
    versions = {importlib.import_module(name).__version__ for name in names}
    if versions == {"0+unknown"}:
        pytest.skip("the packages are not installed, so they have no version")
    assert len(versions) == 1


#: Folders of the verify package, from the lowest up. What stands on one line imports nothing of it.
FLOORS = (
    ("inputs", "processes"),
    ("terminal", "measure", "peers"),
    ("evidence",),
    ("models", "gpu_runs"),
    ("attribution", "stage_trace", "black_box", "push", "hardware", "bench"),
    ("audit",),
    ("planted",),
)


def verify_imports():
    """Each file of verify, as room and stem, with the rooms and stems that it imports anywhere."""
    (home,) = importlib.import_module("sparse_mla_verify").__path__
    folder = Path(home)
    files = {path.relative_to(folder).with_suffix("").parts: path for path in folder.rglob("*.py")}
    for own, path in files.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            module = (isinstance(node, ast.ImportFrom) and node.module) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("sparse_mla_verify."):
                parts = tuple(module.split(".")[1:])
                names = {(*parts, alias.name) for alias in node.names}
                found |= {name if name in files else parts for name in names}
        yield own, found


def test_verify_s_folders_import_only_folders_below_them():
    floor = {room: k for k, rooms in enumerate(FLOORS) for room in rooms}
    seen = set()
    for own, found in verify_imports():
        if len(own) > 1:
            seen.add(own[0])
            other = {room for room, *_ in found if room != own[0]}
            assert {room for room in other if floor[room] >= floor[own[0]]} == set(), own
    assert seen == floor.keys()


def test_no_files_of_verify_import_each_other_in_a_circle():
    left = dict(verify_imports())
    while left:
        free = {own for own, found in left.items() if not (found - {own}) & left.keys()}
        assert free, f"in a circle, or above one: {sorted(left)}"
        left = {own: found for own, found in left.items() if own not in free}
