"""Speed of the reference, printed as a table: ``python packages/reference/benchmarks/speed.py``.

Every figure is the best of a few runs: a loaded machine only adds. With ``mmasim`` and torch
installed, MMA-Sim computes the same instructions, and the bits of the two are compared.
"""

import importlib.util
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparse_mla_reference import IDEAL, SM120, bounds, decode, e4m3, mufu
from sparse_mla_reference.instructions.tensor_core import (
    SM90_E4M3,
    SM90_F16,
    SM90_WGMMA_E4M3,
    Model,
    mma,
)
from sparse_mla_reference.schedule import LOW_LATENCY


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Best wall time of ``work``."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Unit normal E4M3 bytes."""
    return e4m3.encode(rng.standard_normal(shape))


def uniform(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Uniform over all finite E4M3 bytes."""
    return (rng.integers(0, 0x7F, shape) | (rng.integers(0, 2, shape) << 7)).astype(np.uint8)


def report(name: str, value: str) -> None:
    """Print one figure."""
    print(f"{name:<56} {value:>18}", flush=True)


def time_decode(rng: np.random.Generator) -> None:
    """The latency checkpoint: 5 rows, 96 heads, 256 keys."""
    query, kv = normal(rng, 5, 96, 576), normal(rng, 4096, 576)
    rows = rng.integers(0, 4096, (5, 256)).astype(np.int32)
    arguments = (query, kv, rows, np.full(5, 256, np.int32))
    scales: dict[str, Any] = {"scale_log2": 0.06, "out_scale": 1.0}
    report("decode SM90, 5 x 96 x 256", f"{seconds(lambda: decode(*arguments, **scales)):.3f} s")
    loud = (uniform(rng, 5, 96, 576), uniform(rng, 4096, 576), *arguments[2:])
    quiet: dict[str, Any] = {"scale_log2": 1e-5, "out_scale": 1.0}
    report("  uniform bytes", f"{seconds(lambda: decode(*loud, **quiet)):.3f} s")
    fast = seconds(lambda: decode(*arguments, **scales, schedule=LOW_LATENCY))
    report("  low-latency schedule", f"{fast:.3f} s")
    for machine in (SM120, IDEAL):
        best = seconds(partial(decode, *arguments, **scales, machine=machine))
        report(f"  {machine.name}", f"{best:.3f} s")
    report("bounds", f"{seconds(lambda: bounds(*arguments, **scales)):.3f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report("peak memory of the process so far", f"{peak:.2f} GiB")


def time_mma(rng: np.random.Generator) -> None:
    """Multiply-adds a second."""
    for model in (SM90_E4M3, SM90_WGMMA_E4M3):
        for source in (normal, uniform):
            a, b = source(rng, 1024, 512), source(rng, 512, 1024)
            report_mma(model, source.__name__, a, b)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((512, 512), (512, 512)))
    report_mma(SM90_F16, "normal", a, b)


def report_mma(model: Model, name: str, a: np.ndarray, b: np.ndarray) -> None:
    """One line for ``a @ b``."""
    c = np.zeros((len(a), b.shape[1]), np.float32)
    rate = a.size * b.shape[1] / seconds(lambda: mma(a, b, c, model=model))
    report(f"mma {model.name}, {name}", f"{rate / 1e6:,.0f} M MAC/s")


def time_mma_sim(rng: np.random.Generator) -> None:
    """MMA-Sim on the same instruction, m64n8k32 E4M3 wgmma, and whether the bits agree."""
    if importlib.util.find_spec("mmasim") is None or importlib.util.find_spec("torch") is None:
        report("MMA-Sim", "not installed")
        return
    import torch
    from mmasim.nv_ptx import sim

    a, b = uniform(rng, 64, 32), uniform(rng, 32, 8)
    c = rng.standard_normal((64, 8)).astype(np.float32)
    theirs = sim.WGMMA("Hopper", "m64n8k32.f32.e4m3.e4m3")
    fp8 = torch.float8_e4m3fn
    arguments = (
        torch.from_numpy(a).view(fp8), torch.from_numpy(b).view(fp8), torch.from_numpy(c)
    )  # fmt: skip
    took = seconds(lambda: theirs(*arguments), repeats=1)
    ours = mma(a, b, c, model=SM90_WGMMA_E4M3)
    differing = int((theirs(*arguments).numpy().view(np.uint32) != ours.view(np.uint32)).sum())
    report("MMA-Sim SM90_WGMMA_E4M3, uniform", f"{64 * 8 * 32 / took / 1e6:,.3f} M MAC/s")
    report("  elements that differ from ours", f"{differing} of {ours.size}")


def main() -> None:
    """Print all figures."""
    rng = np.random.default_rng(0)
    time_decode(rng)
    time_mma(rng)
    x = rng.uniform(-100, 8, 1 << 20).astype(np.float32)
    report("ex2", f"{x.size / seconds(lambda: mufu.ex2(x)) / 1e6:,.0f} M/s")
    report("e4m3.encode", f"{x.size / seconds(lambda: e4m3.encode(x)) / 1e6:,.0f} M/s")
    time_mma_sim(rng)


if __name__ == "__main__":
    main()
