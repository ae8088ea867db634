import pytest
from rich.console import Console

from sparse_mla_kernel import BASE
from sparse_mla_kernel.host import cache
from sparse_mla_verify.bench import (
    grid,
    precompile,
)
from sparse_mla_verify.bench.grid import (
    FULL,
    WIDE,
)
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.peers.point import Point


def test_kernels_of_a_run():
    points = [Point(1, 16, 4), Point(1, 16, 8), Point(2, 16, 4)]
    assert precompile.shapes(points, points[:1], 64) == [(1, 16, 64), (2, 16, 64), (1, 16, 4)]
    assert len(precompile.shapes(FULL, WIDE, grid.WIDTH)) == 8 * 4 + 4


def test_what_is_timed_is_compiled_before(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    compile_all = precompile.compile_all
    schedules = {"base": BASE, "low-latency": kernel_schedule("low-latency")}
    seen = []

    def compile_one(*sizes, schedule):
        seen.append((sizes, schedule))
        if sizes[0] == 2:
            raise RuntimeError("no such kernel\nand more")
        return True

    monkeypatch.setattr(precompile, "precompile_sparse", compile_one)
    shapes = [(1, 16, 64), (2, 32, 64)]
    about = compile_all(shapes, schedules, "sm_90a", Console(width=200), workers=1)
    assert seen == [
        ((rows, heads, heads, width, rows, "sm_90a"), schedules[name])
        for name in ("low-latency", "base")
        for rows, heads, width in shapes
    ]
    assert (about["kernels"], about["failed"], about["processes"]) == (4, 2, 1)
    assert capsys.readouterr().out.count("no such kernel") == 2
    monkeypatch.setenv("SPARSE_MLA_CACHE", "0")
    assert compile_all(shapes, schedules, "sm_90a", Console()) == {"kernels": 0}
    assert len(seen) == 4


@pytest.mark.compiler
def test_processes_compile_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    shapes = [(1, 16, 8), (2, 16, 8)]
    about = precompile.compile_all(shapes, {"base": BASE}, "sm_90a", Console(), workers=2)
    assert (about["kernels"], about["failed"], about["processes"]) == (2, 0, 2)
    sizes: dict[str, object] = {"batch": 2, "heads": 16, "padded": 16, "width": 8, "cap": 2}
    sizes |= {"push": None, "schedule": dict(vars(BASE))}
    assert cache.holds(cache.describe("decode", "sm_90a", sizes))
    assert len(list(tmp_path.iterdir())) == 2
