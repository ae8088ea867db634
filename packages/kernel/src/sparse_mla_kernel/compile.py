"""Compiling the kernel: for the GPU that is there, or for any architecture without one."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.base_dsl.compiler import DumpDir, EnableTVMFFI, GPUArch, KeepCUBIN, KeepPTX
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel.checks import (
    ARCHITECTURES,
    architecture_of,
    check_cap,
    check_geometry,
    resolve_device,
)
from sparse_mla_kernel.decode import SparseDcpDecode
from sparse_mla_kernel.schedule import BASE, LATENT_COLUMNS, ROW_COLUMNS, Schedule

Push = tuple[int, int, int]


@dataclass(frozen=True)
class Artifact:
    """What the compiler made of the kernel.

    Args:
        arch: Architecture, such as ``"sm_90a"``.
        ptx: The PTX.
        cubin: The machine code, an ELF file. It depends on the kernel's source, the DSL's version
            and the static sizes alone: neither on the machine nor on the Python version.
    """

    arch: str
    ptx: str
    cubin: bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the cubin, in hex."""
        return hashlib.sha256(self.cubin).hexdigest()

    def sass(self) -> str:
        """The disassembly.

        Raises:
            FileNotFoundError: ``nvdisasm`` is neither on the PATH nor installed as a package.
            RuntimeError: It could not read the cubin.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            done = subprocess.run(
                [_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True)
class CompiledSparse:
    """A loaded kernel and the sizes that it was compiled for; :func:`run_sparse` launches it."""

    batch: int
    heads: int
    padded: int
    width: int
    cap: int
    device: torch.device
    schedule: Schedule
    artifact: Artifact
    launch: Callable[..., None]


def compile_sparse(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    device: torch.device | str | int,
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> CompiledSparse:
    """Compile and load the kernel for one batch shape, once a process and device.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox, at least ``batch``.
        device: A CUDA device.
        push: ``(owner heads, ranks, cap)`` for push mode. Not supported yet.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernel.
        RuntimeError: There is no usable CUDA device.
        NotImplementedError: ``push`` is given.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    where = resolve_device(device)
    architecture_of(where)
    return _compile_loaded(batch, heads, padded, width, cap, where, push, schedule)


@functools.cache
def _compile_loaded(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    device: torch.device,
    push: Push | None,
    schedule: Schedule,
) -> CompiledSparse:
    arch = architecture_of(device)
    kernel = SparseDcpDecode(batch, heads, padded, width, push, schedule=schedule)
    with torch.cuda.device(device):
        launch, artifact = _compile(kernel, cap, arch)
    return CompiledSparse(batch, heads, padded, width, cap, device, schedule, artifact, launch)


def cross_compile(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    arch: str = "sm_90a",
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> Artifact:
    """Compile the kernel for an architecture, on a machine with or without a GPU.

    Args:
        batch: As :func:`compile_sparse`, with the other sizes.
        heads: See there.
        padded: See there.
        width: See there.
        cap: See there.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"sm_120a"``.
        push: See :func:`compile_sparse`.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
        NotImplementedError: ``push`` is given.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if arch not in ARCHITECTURES.values():
        raise ValueError(f"arch is {arch!r}; it may be {', '.join(ARCHITECTURES.values())}")
    kernel = SparseDcpDecode(batch, heads, padded, width, push, schedule=schedule)
    return _compile(kernel, cap, arch)[1]


def _compile(kernel: SparseDcpDecode, cap: int, arch: str) -> tuple[Callable[..., None], Artifact]:
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), KeepCUBIN(), DumpDir(folder), EnableTVMFFI())
        launch = cute.compile[options](kernel, *_fake_arguments(kernel, cap))
        return launch, Artifact(arch, launch.__ptx__, launch.__cubin__)


def _fake_arguments(kernel: SparseDcpDecode, cap: int) -> tuple[object, ...]:
    """What the kernel is called with, as types: static sizes, but for N and the lists' lengths."""
    batch, padded, width = kernel.batch, kernel.padded, kernel.width

    def tensor(dtype: type, *shape: object, align: int) -> object:
        strides: list[int] = [1]
        for size in reversed(shape[1:]):
            assert isinstance(size, int)
            strides.insert(0, strides[0] * size)
        return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)

    return (
        tensor(Uint8, cap, padded, ROW_COLUMNS, align=16),
        tensor(Uint8, cute.sym_int64(), ROW_COLUMNS, align=16),
        tensor(Int32, cute.sym_int64(), width, align=4),
        tensor(Int32, cute.sym_int64(), align=4),
        tensor(BFloat16, batch, padded, LATENT_COLUMNS, align=16),
        tensor(Float32, batch, padded, align=4),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _nvdisasm() -> str:
    found = shutil.which("nvdisasm")
    if found is None:
        # The package nvidia-cuda-nvdisasm puts it beside the DSL, into nvidia/cu13/bin.
        for root in map(Path, sys.path):
            candidate = root / "nvidia" / "cu13" / "bin" / "nvdisasm"
            if candidate.is_file():
                return str(candidate)
        raise FileNotFoundError("nvdisasm: install the CUDA toolkit or nvidia-cuda-nvdisasm")
    return found
