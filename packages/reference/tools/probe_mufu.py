"""Record what an NVIDIA GPU's special-function unit (MUFU) returns.

    python probe_mufu.py OUT_DIR              # on a machine with the GPU
    python probe_mufu.py OUT_DIR --condense   # anywhere: OUT_DIR/condensed, as kept in tests/data

Recording needs a GPU, CuPy and numpy; takes under a minute on an H200. Writes five files:

* ``mufu_meta.json``: GPU, driver, versions, hash of the cubin, layout of the rest;
* ``mufu_probe.cubin``: the code that ran, so that its SASS can be read anywhere;
* ``mufu_hashes.npz``: for every one-input operation a 64-bit hash of each of the 32,768 blocks
  of 2^17 consecutive encodings (all 2^32 inputs), and 256 raw results per sign and exponent;
* ``mufu_tables.npz``: every mantissa of chosen binades (rcp, rsqrt, sqrt, ex2, lg2), raw results,
  difference-coded, and the inputs where rcp and rsqrt leave their scaling law;
* ``mufu_div.npz``: ``div`` forms on pseudo-random operand pairs.

Condensing keeps the tables that `fit_mufu` needs and hashes of everything else: for each sign and
exponent, of all 2^23 mantissas (``NAME``) and of the 256 samples (``NAME_samples``); for ``div``,
of each 2^17 pairs of a family.

Nothing recorded depends on a host's libm: all of it is raw encodings and integer hashes.
``unpack`` reads the coded arrays back; ``block_hashes`` is the hash for a model's results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

UNARY: dict[str, str] = {
    "ex2_ftz": "ex2.approx.ftz.f32 %0, %1;",
    "ex2": "ex2.approx.f32 %0, %1;",
    "lg2_ftz": "lg2.approx.ftz.f32 %0, %1;",
    "lg2": "lg2.approx.f32 %0, %1;",
    "rcp_ftz": "rcp.approx.ftz.f32 %0, %1;",
    "rcp": "rcp.approx.f32 %0, %1;",
    "rsqrt_ftz": "rsqrt.approx.ftz.f32 %0, %1;",
    "rsqrt": "rsqrt.approx.f32 %0, %1;",
    "sqrt_ftz": "sqrt.approx.ftz.f32 %0, %1;",
    "sqrt": "sqrt.approx.f32 %0, %1;",
    "exp_ftz": "{ .reg .f32 t; mul.rn.ftz.f32 t, %1, 0f3FB8AA3B; ex2.approx.ftz.f32 %0, t; }",
    "exp": "{ .reg .f32 t; mul.rn.f32 t, %1, 0f3FB8AA3B; ex2.approx.f32 %0, t; }",
}
BINARY: dict[str, str] = {
    "div_approx_ftz": "div.approx.ftz.f32 %0, %1, %2;",
    "div_approx": "div.approx.f32 %0, %1, %2;",
    "div_full_ftz": "div.full.ftz.f32 %0, %1, %2;",
    "div_full": "div.full.f32 %0, %1, %2;",
}
# Operation -> unbiased exponents whose 2^23 mantissas are recorded one by one.
TABLES: dict[str, tuple[int, ...]] = {
    "rcp_ftz": (0,),
    "rsqrt_ftz": (0, 1),
    "sqrt_ftz": (0, 1),
    "ex2_ftz": (0, -1, -4, -12),
    # |log2| lies in another binade each time, so that the unit's final rounding shows.
    "lg2_ftz": (0, -1, 1, -2, 2, -3, 3, 4, -5, 7, 8, -10, 15, 16, -20, 31, 32, 64, -64, 127, -126),
}

BLOCK = 1 << 17  # encodings per hash
MANTISSAS = 1 << 23
PAIRS = 1 << 20  # operand pairs per family of the div recording
MAX_EXCEPTIONS = 1 << 16

_PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 mix(u64 z) {  // splitmix64
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

extern "C" __global__ void scaling(const u32* got, const u32* table, u32 base, int shift,
                                   u32* count, u32* where, u32* what) {
    // got: results of one binade; law: table with the exponent lowered by shift, flushed to zero.
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    int bits = (int)table[i] - (shift << 23);
    u32 want = bits < (1 << 23) ? 0u : (u32)bits;
    if (got[i] != want) {
        u32 n = atomicAdd(count, 1u);
        if (n < %(max)du) { where[n] = base + i; what[n] = got[i]; }
    }
}
"""

_UNARY = r"""
__device__ __forceinline__ u32 op_%(name)s(u32 x) {
    float y;
    asm volatile("%(ptx)s" : "=f"(y) : "f"(__uint_as_float(x)));
    return __float_as_uint(y);
}

extern "C" __global__ void table_%(name)s(u32 base, u32* out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = op_%(name)s(base + i);
}

extern "C" __global__ void gather_%(name)s(const u32* in, u32* out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = op_%(name)s(in[i]);
}

extern "C" __global__ void hash_%(name)s(u64* out) {
    __shared__ u64 part[256];
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < %(block)du; i += 256u)
        sum += (u64)op_%(name)s(blockIdx.x * %(block)du + i) * (mix(i) | 1ull);
    part[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 128u; half > 0u; half >>= 1) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0u) out[blockIdx.x] = part[0];
}
"""

_BINARY = r"""
extern "C" __global__ void pairs_%(name)s(const u32* a, const u32* b, u32* out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    float y;
    asm volatile("%(ptx)s"
                 : "=f"(y) : "f"(__uint_as_float(a[i])), "f"(__uint_as_float(b[i])));
    out[i] = __float_as_uint(y);
}
"""


def source() -> str:
    """The CUDA source of the probe: one table, gather and hash kernel per operation."""
    parts = [_PRELUDE % {"max": MAX_EXCEPTIONS}]
    parts += [_UNARY % {"name": n, "ptx": p, "block": BLOCK} for n, p in UNARY.items()]
    parts += [_BINARY % {"name": n, "ptx": p} for n, p in BINARY.items()]
    return "".join(parts)


def mix64(z: np.ndarray) -> np.ndarray:
    """splitmix64 of a uint64 array: the same function as in the device code."""
    z = z.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def hash_weights(count: int) -> np.ndarray:
    """The odd pseudo-random weights of the multilinear hash: uint64 [count]."""
    return mix64(np.arange(count, dtype=np.uint64)) | np.uint64(1)


def block_hashes(results: np.ndarray) -> np.ndarray:
    """Hash of each run of 2^17 results (uint32, a multiple of 2^17 of them), as uint64.

    A multilinear hash with odd pseudo-random weights modulo 2^64: one wrong word always shows.
    """
    weights = hash_weights(BLOCK)
    return np.array([row.astype(np.uint64) @ weights for row in results.reshape(-1, BLOCK)])


def row_hashes(blocks: np.ndarray) -> np.ndarray:
    """Block hashes (a multiple of 64) combined into one per sign and exponent, as uint64."""
    return np.asarray(blocks.reshape(-1, 64) @ hash_weights(64))


def sample_hashes(results: np.ndarray) -> np.ndarray:
    """Hash of the 256 sampled results of each sign and exponent: uint32 [512, 256] to uint64."""
    return np.asarray(results.astype(np.uint64) @ hash_weights(256))


def sample_mantissas() -> np.ndarray:
    """The 256 mantissas recorded for every sign and exponent: ends, powers of two, random."""
    ends = np.concatenate([np.arange(16), MANTISSAS - 1 - np.arange(16)])
    powers = np.concatenate([(1 << np.arange(4, 23)) + d for d in (-1, 0, 1)])
    fixed = np.unique(np.concatenate([ends, powers]))
    random = (mix64(np.arange(512, dtype=np.uint64)) >> np.uint64(41)).astype(np.int64)
    rest = random[~np.isin(random, fixed)][: 256 - fixed.size]
    return np.sort(np.concatenate([fixed, rest]))


def sample_inputs() -> np.ndarray:
    """uint32 [512, 256]: `sample_mantissas` under every sign and exponent."""
    heads = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    return heads | sample_mantissas().astype(np.uint32)[None, :]


def div_operands(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Operand encodings of one family of the div recording, uint32 [PAIRS] each.

    ``any``: all encodings alike. ``near``: both in [1, 2). ``edge``: finite |b| from 2^124 up,
    where `div.full` scales and `div.approx` gives 0. ``small``: |b| below 2^-121,
    subnormals included.
    """
    index = np.arange(PAIRS, dtype=np.uint64)
    seed = {"any": 1, "near": 2, "edge": 3, "small": 4}[family]
    words = mix64(index + np.uint64(seed << 32))
    a, b = (words & np.uint64(0xFFFFFFFF)), (words >> np.uint64(32))
    a, b = a.astype(np.uint32), b.astype(np.uint32)
    mantissa, sign = np.uint32(0x7FFFFF), np.uint32(0x80000000)
    if family == "near":
        one = np.uint32(127 << 23)
        a, b = (a & mantissa) | one, (b & mantissa) | one
    elif family == "edge":
        high = (np.uint32(251) + ((b >> np.uint32(23)) & np.uint32(3))) << np.uint32(23)
        b = (b & (sign | mantissa)) | high
    elif family == "small":
        b = b & (sign | np.uint32(0x02FFFFFF))
    return a, b


def rounded_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IEEE quotient of float32 encodings, NaN as 0x7FFFFFFF: the div recording differs from it."""
    with np.errstate(all="ignore"):
        quotient = a.view(np.float32) / b.view(np.float32)
    return np.where(np.isnan(quotient), np.uint32(0x7FFFFFFF), quotient.view(np.uint32))


DIV_FAMILIES = ("any", "near", "edge", "small")


def pack(values: np.ndarray, order: int) -> np.ndarray:
    """uint32 [n] -> xz of the byte planes of its `order`-th differences (mod 2^32), as uint8.

    The first word of the stream is the order; leading values are kept by differencing from 0.
    """
    words = values.astype(np.uint32)
    for _ in range(order):
        words = np.diff(words, prepend=np.uint32(0))
    # Zigzag, so that small negative differences have small upper bytes too.
    signed = words.view(np.int32)
    zigzag = ((signed << 1) ^ (signed >> 31)).view(np.uint32)
    planes = np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 4).T)
    blob = bytes([order]) + lzma.compress(planes.tobytes(), preset=3)
    return np.frombuffer(blob, dtype=np.uint8)


def unpack(blob: np.ndarray) -> np.ndarray:
    """The uint32 array that `pack` coded."""
    data = blob.tobytes()
    planes = np.frombuffer(lzma.decompress(data[1:]), dtype=np.uint8).reshape(4, -1)
    zigzag = np.ascontiguousarray(planes.T).view(np.uint32).ravel()
    words = (zigzag >> np.uint32(1)) ^ (np.uint32(0) - (zigzag & np.uint32(1)))
    for _ in range(data[0]):
        words = np.cumsum(words, dtype=np.uint32)
    return words


class Gpu:
    """The device side: compiles once with NVRTC, launches, copies back."""

    def __init__(self, out: Path) -> None:
        import cupy

        self.cupy = cupy
        self.cubin = out / "mufu_probe.cubin"
        self.cubin.write_bytes(self._compile())
        self.module = cupy.RawModule(path=str(self.cubin))

    def _compile(self) -> bytes:
        arch = f"-arch=sm_{self.cupy.cuda.Device().compute_capability}"
        nvrtc = self.cupy.cuda.nvrtc
        try:
            program = nvrtc.createProgram(source(), "probe_mufu.cu", (), ())
            nvrtc.compileProgram(program, (arch,))
            return bytes(nvrtc.getCUBIN(program))
        except Exception as error:  # an NVRTC that this CuPy can't drive: the toolkit's nvcc
            print(f"NVRTC: {error!r}; trying nvcc", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            cu, cubin = Path(folder, "probe.cu"), Path(folder, "probe.cubin")
            cu.write_text(source())
            subprocess.run(["nvcc", arch, "-cubin", "-o", str(cubin), str(cu)], check=True)
            return cubin.read_bytes()

    def _launch(self, name: str, grid: int, args: tuple[Any, ...]) -> None:
        self.module.get_function(name)((grid,), (256,), args)

    def table(self, op: str, head: int) -> Any:
        """Device uint32 [2^23]: results for the encodings ``head << 23 | mantissa``."""
        out = self.cupy.empty(MANTISSAS, dtype=np.uint32)
        self._launch(f"table_{op}", MANTISSAS // 256, (np.uint32(head << 23), out))
        return out

    def gather(self, op: str, inputs: np.ndarray) -> np.ndarray:
        """Results for the given encodings; a multiple of 256 of them."""
        device = self.cupy.asarray(inputs.ravel())
        out = self.cupy.empty(inputs.size, dtype=np.uint32)
        self._launch(f"gather_{op}", inputs.size // 256, (device, out))
        return np.asarray(self.cupy.asnumpy(out)).reshape(inputs.shape)

    def hashes(self, op: str) -> np.ndarray:
        """uint64 [32768]: the hash of each block of 2^17 consecutive encodings."""
        out = self.cupy.empty(1 << 15, dtype=np.uint64)
        self._launch(f"hash_{op}", 1 << 15, (out,))
        return np.asarray(self.cupy.asnumpy(out))

    def pairs(self, op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Results of a two-input operation; a multiple of 256 pairs."""
        out = self.cupy.empty(a.size, dtype=np.uint32)
        args = (self.cupy.asarray(a), self.cupy.asarray(b), out)
        self._launch(f"pairs_{op}", a.size // 256, args)
        return np.asarray(self.cupy.asnumpy(out))

    def scaling_exceptions(self, op: str, tables: dict[int, Any]) -> dict[str, np.ndarray]:
        """Count and list the positive normal inputs that leave the scaling law of `op`.

        `tables` maps an exponent to its device table: {0} for rcp, {0, 1} for rsqrt.
        """
        cp = self.cupy
        count, total = np.zeros(254, np.uint32), cp.asarray(np.zeros(1, np.uint32))
        where = cp.asarray(np.zeros(MAX_EXCEPTIONS, np.uint32))
        what = cp.asarray(np.zeros(MAX_EXCEPTIONS, np.uint32))
        seen = 0
        for head in range(1, 255):
            exponent = head - 127
            parity = exponent % len(tables)
            shift = (exponent - parity) // len(tables)
            got = self.table(op, head)
            args = (got, tables[parity], np.uint32(head << 23), np.int32(shift))
            self._launch("scaling", MANTISSAS // 256, (*args, total, where, what))
            now = int(cp.asnumpy(total)[0])
            count[head - 1], seen = now - seen, now
        kept = min(seen, MAX_EXCEPTIONS)
        return {
            f"{op}_exceptions_per_exponent": count,
            f"{op}_exception_inputs": np.asarray(cp.asnumpy(where))[:kept],
            f"{op}_exception_results": np.asarray(cp.asnumpy(what))[:kept],
        }

    def describe(self) -> dict[str, Any]:
        """GPU, driver and versions."""
        cp = self.cupy
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            smi = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            smi = f"nvidia-smi failed: {error}"
        return {
            "gpu": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "nvidia_smi": smi,
            "compute_capability": cp.cuda.Device().compute_capability,
            "cuda_driver": cp.cuda.runtime.driverGetVersion(),
            "nvrtc": list(cp.cuda.nvrtc.getVersion()),
            "cupy": cp.__version__,
            "cubin_sha256": hashlib.sha256(self.cubin.read_bytes()).hexdigest(),
        }


def record(gpu: Any, out: Path) -> None:
    """Run every probe on `gpu` and write the files under `out`."""
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    meta: dict[str, Any] = dict(gpu.describe())
    meta |= {"python": platform.python_version(), "numpy": np.__version__}
    meta |= {"unary": UNARY, "binary": BINARY, "tables": TABLES, "div_families": DIV_FAMILIES}
    (out / "mufu_meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    say(f"{meta['gpu']}, {meta['nvidia_smi']}")

    hashes: dict[str, Any] = {}
    inputs = sample_inputs()
    for op in UNARY:
        hashes[f"{op}_hashes"] = gpu.hashes(op)
        hashes[f"{op}_samples"] = gpu.gather(op, inputs)
    np.savez_compressed(out / "mufu_hashes.npz", **hashes)
    say(f"hashed 2^32 inputs of {len(UNARY)} operations")

    jobs: list[tuple[str, np.ndarray, int]] = []
    plain: dict[str, np.ndarray] = {}
    for op, exponents in TABLES.items():
        tables = {e: gpu.table(op, e + 127) for e in exponents}
        jobs += [(f"{op}_{e}", gpu.cupy.asnumpy(t), 2) for e, t in tables.items()]
        if op in ("rcp_ftz", "rsqrt_ftz"):
            plain |= gpu.scaling_exceptions(op, tables)
            say(f"{op}: {int(plain[f'{op}_exceptions_per_exponent'].sum())} inputs off the law")
    div_jobs: list[tuple[str, np.ndarray, int]] = []
    for family in DIV_FAMILIES:
        a, b = div_operands(family)
        near = rounded_quotient(a, b)
        div_jobs += [(f"{op}_{family}", gpu.pairs(op, a, b) - near, 0) for op in BINARY]
    say(f"read back {len(jobs)} tables, {len(div_jobs)} div families; compressing")

    with ThreadPoolExecutor() as pool:

        def packed(todo: list[tuple[str, np.ndarray, int]]) -> dict[str, Any]:
            blobs = pool.map(lambda job: pack(job[1], job[2]), todo)
            return {job[0]: blob for job, blob in zip(todo, blobs, strict=True)}

        _save_split(out, "mufu_tables", packed(jobs) | plain)
        np.savez(out / "mufu_div.npz", **packed(div_jobs))
    for path in sorted(out.iterdir()):
        say(f"{path.name}: {path.stat().st_size:,} bytes")


FITTED = {"rcp": (0,), "rsqrt": (0, 1), "sqrt": (0, 1), "lg2": (0,)}


def condense(out: Path) -> None:
    """Write ``condensed/``, the small form of what `record` wrote under `out`."""
    kept = out / "condensed"
    kept.mkdir(exist_ok=True)
    meta = json.loads((out / "mufu_meta.json").read_text())
    gpu = meta["gpu"].split()[-1].lower()
    (kept / f"mufu_{gpu}.json").write_text(json.dumps(meta, indent=1) + "\n")
    full, tables = np.load(out / "mufu_hashes.npz"), np.load(out / "mufu_tables.npz")
    hashes: dict[str, Any] = {}
    for op in UNARY:
        hashes[op] = row_hashes(full[f"{op}_hashes"])
        hashes[f"{op}_samples"] = sample_hashes(full[f"{op}_samples"])
    quotients = np.load(out / "mufu_div.npz")
    for family in DIV_FAMILIES:
        near = rounded_quotient(*div_operands(family))
        for op in BINARY:
            hashes[f"{op}_{family}"] = block_hashes(unpack(quotients[f"{op}_{family}"]) + near)
    np.savez(kept / f"mufu_hashes_{gpu}.npz", **hashes)
    for op, exponents in FITTED.items():
        chosen = {f"exponent_{e}": tables[f"{op}_ftz_{e}"] for e in exponents}
        np.savez(kept / f"mufu_{op}_{gpu}.npz", **chosen)


def _save_split(out: Path, stem: str, arrays: dict[str, np.ndarray]) -> None:
    """Save `arrays` as one npz, or as two of about half the size if it would pass 14 MiB."""
    total = sum(a.nbytes for a in arrays.values())
    groups: list[dict[str, Any]] = [{}]
    for name, array in arrays.items():
        filled = sum(a.nbytes for a in groups[-1].values())
        if total > 14 << 20 and len(groups) == 1 and filled + array.nbytes > 14 << 20:
            groups.append({})
        groups[-1][name] = array
    for number, group in enumerate(groups):
        np.savez(out / f"{stem}{number or ''}.npz", **group)


def main() -> None:
    """Record into the folder that the command line names, and condense it."""
    parser = argparse.ArgumentParser(description="Record what a GPU's MUFU returns.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--condense", action="store_true", help="condense an earlier recording")
    args = parser.parse_args()
    if not args.condense:
        args.out.mkdir(parents=True, exist_ok=True)
        record(Gpu(args.out), args.out)
    condense(args.out)


if __name__ == "__main__":
    main()
