"""The GPU's side: each operation as a kernel of its own, in CuTe DSL with inline PTX.

The functions that the decode kernel uses are taken from its `primitives`, so that what is compared
here is what runs there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute, range_constexpr
from cutlass.base_dsl.compiler import DumpDir, EnableTVMFFI, GPUArch, KeepCUBIN, KeepPTX
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel import Artifact
from sparse_mla_kernel.ptx.convert import as_b32, as_f32, cvt_bf16x2, cvt_e4m3x2, prmt
from sparse_mla_kernel.ptx.copy import fence_proxy_async_shared
from sparse_mla_kernel.ptx.global_memory import load_global_b32x4
from sparse_mla_kernel.ptx.math import add_rn, div_rn, ex2_approx_ftz, fma_rn, mul_rn
from sparse_mla_kernel.ptx.mma import mma_e4m3
from sparse_mla_kernel.ptx.shared_memory import store_shared_b32x4
from sparse_mla_verify.hardware.arithmetic import OPERATIONS
from sparse_mla_verify.hardware.families import SIDE
from sparse_mla_verify.hardware.instructions import INSTRUCTIONS, STEP_BYTES
from sparse_mla_verify.hardware.sweeps import SWEEPS

THREADS = 256
STEP_WORDS = STEP_BYTES // 4

# ---- one input: an encoding to a word -----------------------------------------------------------


@cute.jit
def _ex2(x: Float32) -> Uint32:
    return as_b32(ex2_approx_ftz(x))


@cute.jit
def _lg2(x: Float32) -> Uint32:
    y = inline_ptx(
        "lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
    return as_b32(y)


@cute.jit
def _rcp(x: Float32) -> Uint32:
    y = inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
    return as_b32(y)


@cute.jit
def _rsqrt(x: Float32) -> Uint32:
    y = inline_ptx(
        "rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
    return as_b32(y)


@cute.jit
def _cvt_e4m3x2(x: Float32) -> Uint32:
    high, low = cvt_e4m3x2(Float32(1.0), x), cvt_e4m3x2(x, Float32(1.0))
    return Uint32(high) << 16 | Uint32(low)


@cute.jit
def _e5m2x2(low: Float32, high: Float32) -> Uint16:
    return inline_ptx(
        "cvt.rn.satfinite.e5m2x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint16],
        read_only_args=[low, high],
    )


@cute.jit
def _cvt_e5m2x2(x: Float32) -> Uint32:
    high, low = _e5m2x2(Float32(1.0), x), _e5m2x2(x, Float32(1.0))
    return Uint32(high) << 16 | Uint32(low)


@cute.jit
def _cvt_bf16x2(x: Float32) -> Uint32:
    high, low = cvt_bf16x2(Float32(1.0), x), cvt_bf16x2(x, Float32(1.0))
    return prmt(high, low, 0x3254)


@cute.jit
def _cvt_f16(x: Float32) -> Uint32:
    code = inline_ptx("cvt.rn.f16.f32 {$w0}, {$r0};", write_only_types=[Uint16], read_only_args=[x])
    return Uint32(code)


@cute.jit
def _log2f(x: Float32) -> Uint32:
    return as_b32(cute.math.log2(x))


SWEEP_FUNCTIONS = {
    "ex2": _ex2,
    "lg2": _lg2,
    "rcp": _rcp,
    "rsqrt": _rsqrt,
    "cvt_e4m3x2": _cvt_e4m3x2,
    "cvt_e5m2x2": _cvt_e5m2x2,
    "cvt_bf16x2": _cvt_bf16x2,
    "cvt_f16": _cvt_f16,
    "log2f": _log2f,
}


class SweepKernel:
    """The function's word for successive encodings: out[i] = f(first + i)."""

    def __init__(self, function: Callable[[Float32], Uint32]) -> None:
        self.function = function

    @cute.jit
    def __call__(self, mOut: cute.Tensor, first: Int32, blocks: Int32, stream: object) -> None:
        """Launch: ``mOut`` int32 [256 blocks], ``first`` the encoding to begin with."""
        self.kernel(mOut, first).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, first: Int32) -> None:
        """One encoding a thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        mOut[i] = Int32(self.function(as_f32(Uint32(first + i))))


# ---- two or three inputs ------------------------------------------------------------------------


@cute.jit
def _add(a: Float32, b: Float32, c: Float32) -> Float32:
    return add_rn(a, b)


@cute.jit
def _mul(a: Float32, b: Float32, c: Float32) -> Float32:
    return mul_rn(a, b)


@cute.jit
def _div(a: Float32, b: Float32, c: Float32) -> Float32:
    return div_rn(a, b)


OPERATION_FUNCTIONS = {"add": _add, "mul": _mul, "fma": fma_rn, "div": _div}


class Elementwise:
    """out[i] = f(a[i], b[i], c[i]), encodings."""

    def __init__(self, function: Callable[[Float32, Float32, Float32], Float32]) -> None:
        self.function = function

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mC: cute.Tensor,
        mOut: cute.Tensor,
        blocks: Int32,
        stream: object,
    ) -> None:
        """Launch: int32 [256 blocks] each."""
        self.kernel(mA, mB, mC, mOut).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mOut: cute.Tensor) -> None:
        """One element a thread."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        a, b, c = as_f32(Uint32(mA[i])), as_f32(Uint32(mB[i])), as_f32(Uint32(mC[i]))
        mOut[i] = Int32(as_b32(self.function(a, b, c)))


# ---- tensor core, one warp ----------------------------------------------------------------------


@cute.jit
def _mma_f16(c: cute.Tensor, a: cute.Tensor, b0: Uint32, b1: Uint32) -> None:
    c[0], c[1], c[2], c[3] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
    )


@cute.jit
def _mma_bf16(c: cute.Tensor, a: cute.Tensor, b0: Uint32, b1: Uint32) -> None:
    c[0], c[1], c[2], c[3] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
    )


WARP_FUNCTIONS = {"SM90_E4M3": mma_e4m3, "SM90_F16": _mma_f16, "SM90_BF16": _mma_bf16}


class WarpMma:
    """``mma.sync``: a problem is 8 x 16 tiles of 16 x 8, one a warp.

    A step's 32 bytes of a row lie in a fragment alike for 8-bit and for 16-bit operands (PTX ISA,
    "Matrix Fragments for mma.m16n8k16" and "... mma.m16n8k32"): with g = lane / 4 and q = lane % 4,
    words q and q + 4 of rows g and g + 8 of A, words q and q + 4 of column g of B, and elements 2q
    and 2q + 1 of rows g and g + 8 of C.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mC: cute.Tensor,
        mD: cute.Tensor,
        problems: Int32,
        steps: Int32,
        stream: object,
    ) -> None:
        """Launch.

        Args:
            mA: ``[problems, 128, 8 steps]`` int32 words, rows of A.
            mB: likewise, columns of B.
            mC: ``[problems, 128, 128]`` f32.
            mD: likewise, out.
            problems: their number.
            steps: of the instruction, along K.
            stream: a DSL stream handle.
        """
        self.kernel(mA, mB, mC, mD, steps).launch(
            grid=(problems, SIDE * SIDE // (16 * 8) // (THREADS // 32), 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor, steps: Int32
    ) -> None:
        """One tile a warp, along K."""
        thread, _, _ = cute.arch.thread_idx()
        problem, group, _ = cute.arch.block_idx()
        tile = group * (THREADS // 32) + thread // 32
        g, q = thread % 32 // 4, thread % 4
        row, column = problem * SIDE + tile // 16 * 16 + g, tile % 16 * 8
        line = STEP_WORDS * steps
        a = row * line + q
        b = (problem * SIDE + column + g) * line + q
        c = row * SIDE + column + 2 * q
        below_c = c + 8 * SIDE

        rA = cute.make_rmem_tensor(4, Uint32)
        rC = cute.make_rmem_tensor(4, Float32)
        rC[0], rC[1], rC[2], rC[3] = mC[c], mC[c + 1], mC[below_c], mC[below_c + 1]
        for _step in range(steps):
            rA[0], rA[1] = Uint32(mA[a]), Uint32(mA[a + 8 * line])
            rA[2], rA[3] = Uint32(mA[a + 4]), Uint32(mA[a + 8 * line + 4])
            self.function(rC, rA, Uint32(mB[b]), Uint32(mB[b + 4]))
            a += STEP_WORDS
            b += STEP_WORDS
        mD[c], mD[c + 1], mD[below_c], mD[below_c + 1] = rC[0], rC[1], rC[2], rC[3]


# ---- tensor core, one warpgroup -----------------------------------------------------------------

WARPGROUP = 128
TILE = 64  # M and N of one instruction here
ACCUMULATORS = TILE * TILE // WARPGROUP
# Bytes of a core matrix: 8 rows of 16 bytes.
CORE_BYTES = 128
CORE_ROWS = 8
# The shared memory matrix layout (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory
# Layout", K-major, no swizzle): core matrices, each contiguous. The leading dimension byte offset
# goes from one to the next along K, the stride dimension byte offset along M or N. A step's rows
# are two core matrices wide.
LEADING_BYTES = CORE_BYTES
STRIDE_BYTES = 2 * CORE_BYTES
TILE_BYTES = TILE // CORE_ROWS * STRIDE_BYTES


@cute.jit
def _descriptor(address: Int32) -> Int64:
    """The matrix descriptor of a tile in shared memory (PTX ISA, "Matrix Descriptor Format").

    Bits 0-13 start address, 16-29 leading and 32-45 stride dimension byte offset, each without its
    lowest four bits; 49-51 base offset 0; 62-63 swizzle mode 0, none.
    """
    start = Int64((address & 0x3FFFF) >> 4)
    return start | Int64(LEADING_BYTES >> 4 << 16 | STRIDE_BYTES >> 4 << 32)


def _wgmma(instruction: str, immediates: str) -> str:
    """PTX of one step: fence, multiply, commit, wait, in one block.

    So no register of the accumulator can be touched between the fence and the wait. {$w} are D,
    {$r} C, then the two descriptors. scale-d is true: D = A x B + D.
    """
    n = ACCUMULATORS
    registers = ", ".join(f"d{i}" for i in range(n))
    lines = [f".reg .f32 {registers};", ".reg .pred p;", "setp.eq.u32 p, 0, 0;"]
    lines += [f"mov.f32 d{i}, {{$r{i}}};" for i in range(n)]
    lines += [
        "wgmma.fence.sync.aligned;",
        f"{instruction} {{{registers}}}, {{$r{n}}}, {{$r{n + 1}}}, p, {immediates};",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
    ]
    lines += [f"mov.f32 {{$w{i}}}, d{i};" for i in range(n)]
    return "{ " + " ".join(lines) + " }"


# Scale A and B by 1, and of 16-bit operands: transpose neither.
WARPGROUP_PTX = {
    "SM90_WGMMA_F16": _wgmma(INSTRUCTIONS["SM90_WGMMA_F16"].ptx, "1, 1, 0, 0"),
    "SM90_WGMMA_E4M3": _wgmma(INSTRUCTIONS["SM90_WGMMA_E4M3"].ptx, "1, 1"),
}


class WarpgroupMma:
    """``wgmma``: a problem is 2 x 2 tiles of 64 x 64, one a CTA of one warpgroup."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mC: cute.Tensor,
        mD: cute.Tensor,
        problems: Int32,
        steps: Int32,
        stream: object,
    ) -> None:
        """Launch: arguments as those of `WarpMma`."""
        self.kernel(mA, mB, mC, mD, steps).launch(
            grid=(problems, SIDE // TILE, SIDE // TILE), block=(WARPGROUP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor, steps: Int32
    ) -> None:
        """One tile, along K."""
        thread, _, _ = cute.arch.thread_idx()
        problem, tile_row, tile_column = cute.arch.block_idx()
        smem = SmemAllocator().allocate_array(Uint32, 2 * TILE_BYTES // 4, byte_alignment=128)
        smem_a = smem.toint()
        smem_b = smem_a + TILE_BYTES

        # Each thread brings 16 bytes of A and of B a step: half a row.
        row, half = thread // 2, thread % 2
        place = row // CORE_ROWS * STRIDE_BYTES + half * LEADING_BYTES + row % CORE_ROWS * 16
        line = STEP_BYTES * steps
        a_row = problem * SIDE + tile_row * TILE + row
        b_row = problem * SIDE + tile_column * TILE + row
        a = mA.iterator.toint() + Int64(a_row * line + half * 16)
        b = mB.iterator.toint() + Int64(b_row * line + half * 16)

        # D fragment (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): warp w has rows
        # 16 w + g and 8 below, columns 8 j + 2 q and the next, as registers 4 j to 4 j + 3.
        g, q = thread % 32 // 4, thread % 4
        c_row = problem * SIDE + tile_row * TILE + thread // 32 * 16 + g
        c = c_row * SIDE + tile_column * TILE + 2 * q
        rC = cute.make_rmem_tensor(ACCUMULATORS, Float32)
        for j in range_constexpr(TILE // 8):
            for i in range_constexpr(4):
                rC[4 * j + i] = mC[c + 8 * j + i // 2 * 8 * SIDE + i % 2]
        for _step in range(steps):
            store_shared_b32x4(smem_a + place, *load_global_b32x4(a))
            store_shared_b32x4(smem_b + place, *load_global_b32x4(b))
            fence_proxy_async_shared()
            cute.arch.sync_threads()
            self.multiply(rC, smem_a, smem_b)
            cute.arch.sync_threads()
            a += STEP_BYTES
            b += STEP_BYTES
        for j in range_constexpr(TILE // 8):
            for i in range_constexpr(4):
                mD[c + 8 * j + i // 2 * 8 * SIDE + i % 2] = rC[4 * j + i]

    @cute.jit
    def multiply(self, rC: cute.Tensor, smem_a: Int32, smem_b: Int32) -> None:
        """One step of the instruction into rC, done when it returns."""
        d = inline_ptx(
            self.ptx,
            write_only_types=[Float32] * ACCUMULATORS,
            read_only_args=[
                *[rC[i] for i in range(ACCUMULATORS)],
                _descriptor(smem_a),
                _descriptor(smem_b),
            ],
        )
        for i in range_constexpr(ACCUMULATORS):
            rC[i] = d[i]


# ---- compiling ----------------------------------------------------------------------------------


def names() -> tuple[str, ...]:
    """Everything that `build` knows, in the order in which it is safe to run: wgmma last."""
    return (*SWEEPS, *OPERATIONS, *INSTRUCTIONS)


def expected_sass(name: str) -> str:
    """Text that the machine code of a kernel must have."""
    for known in (SWEEPS, OPERATIONS, INSTRUCTIONS):
        if name in known:
            return str(known[name].sass)
    raise ValueError(f"name must be one of {', '.join(names())}, got {name!r}")


def build(name: str, arch: str = "sm_90a") -> tuple[Callable[..., None], Artifact]:
    """Compile the kernel of an operation, on a computer with or without a GPU.

    Returns:
        The launch, to be called with the arguments of the kernel's class (torch tensors, flat; the
        stream is the current one), and what it was compiled to.
    """
    words, floats, zero = _fake(Int32), _fake(Float32), Int32(0)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    function: Any
    arguments: tuple[Any, ...]
    if name in SWEEP_FUNCTIONS:
        function, arguments = SweepKernel(SWEEP_FUNCTIONS[name]), (words, zero, zero)
    elif name in OPERATION_FUNCTIONS:
        function, arguments = Elementwise(OPERATION_FUNCTIONS[name]), (*[words] * 4, zero)
    elif name in WARP_FUNCTIONS:
        function = WarpMma(WARP_FUNCTIONS[name])
        arguments = (words, words, floats, floats, zero, zero)
    elif name in WARPGROUP_PTX:
        function = WarpgroupMma(WARPGROUP_PTX[name])
        arguments = (words, words, floats, floats, zero, zero)
    else:
        raise ValueError(f"name must be one of {', '.join(names())}, got {name!r}")
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), KeepCUBIN(), DumpDir(folder), EnableTVMFFI())
        launch = cute.compile[options](function, *arguments, stream)
        return launch, Artifact(arch, launch.__ptx__, launch.__cubin__)


def _fake(dtype: type) -> Any:
    return make_fake_tensor(dtype, (cute.sym_int64(),), (1,), assumed_align=16)
