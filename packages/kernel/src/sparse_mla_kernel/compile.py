"""Compiling the kernel: for the GPU that is there, or for any architecture without one."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.base_dsl.compiler import DumpDir, EnableTVMFFI, GPUArch, KeepCUBIN, KeepPTX
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel.checks import (
    architecture_of,
    check_arch,
    check_cap,
    check_geometry,
    check_push,
    check_schedule,
    resolve_device,
)
from sparse_mla_kernel.decode import SparseDcpDecode
from sparse_mla_kernel.low_latency.decode import LowLatencyDecode
from sparse_mla_kernel.mailbox import DeviceMailbox, MailboxLayout
from sparse_mla_kernel.owner_merge import OwnerMerge
from sparse_mla_kernel.query_exchange import QueryExchange
from sparse_mla_kernel.schedule import BASE, LATENT_COLUMNS, ROW_COLUMNS, Schedule
from sparse_mla_kernel.step import DcpStep

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
    push: Push | None = None


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
        push: ``(owner heads, ranks, cap)`` for push mode, of a mailbox with as many rows.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernel.
        RuntimeError: There is no usable CUDA device.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if push is not None:
        check_push(push, heads, cap)
    check_schedule(schedule)
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
    kernel = decode_kernel(batch, heads, padded, width, push, schedule)
    with torch.cuda.device(device):
        launch, artifact = _compile(*_entry(kernel, cap), arch)
    return CompiledSparse(
        batch, heads, padded, width, cap, device, schedule, artifact, launch, push
    )


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
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if push is not None:
        check_push(push, heads, cap)
    check_arch(arch)
    check_schedule(schedule)
    kernel = decode_kernel(batch, heads, padded, width, push, schedule)
    return _compile(*_entry(kernel, cap), arch)[1]


def decode_kernel(
    batch: int, heads: int, padded: int, width: int, push: Push | None, schedule: Schedule
) -> SparseDcpDecode | LowLatencyDecode:
    """The kernel that runs a schedule.

    Raises:
        ValueError: A size is out of range, or the schedule has no push mode.
    """
    if schedule.mma == "e4m3":
        return SparseDcpDecode(batch, heads, padded, width, push, schedule=schedule)
    if push is not None:
        raise ValueError("schedule.mma is 'f16'; in push mode it may be 'e4m3'")
    return LowLatencyDecode(batch, heads, padded, width, schedule=schedule)


@dataclass(frozen=True)
class CompiledStep:
    """The kernels of one step under decode context parallelism, loaded, and their sizes.

    Args:
        batch: Decode rows.
        width: Row ids that a row's list holds.
        box: The mailbox's layout.
        device: Where they are loaded.
        artifacts: By name: ``"exchange"``, ``"decode"``, ``"merge"``.
        exchange: Launches the query exchange.
        decode: Launches the decode with push.
        merge: Launches the owner merge.
        step: Launches all three in one call.
    """

    batch: int
    width: int
    box: MailboxLayout
    device: torch.device
    artifacts: Mapping[str, Artifact]
    exchange: Callable[..., None]
    decode: Callable[..., None]
    merge: Callable[..., None]
    step: Callable[..., None]


@functools.cache
def compile_step(
    batch: int, width: int, box: MailboxLayout, device: torch.device, schedule: Schedule = BASE
) -> CompiledStep:
    """Compile and load a step's kernels, once a process and device.

    Args:
        batch: Decode rows, at most ``box.cap``.
        width: Row ids that a row's list holds.
        box: The mailbox's layout.
        device: A CUDA device.
        schedule: Order of rounding.

    Raises:
        ValueError: An argument is out of range, or the device can't run the kernels.
        RuntimeError: There is no usable CUDA device.
    """
    arch = architecture_of(device)
    entries = _step_entries(batch, width, box, schedule)
    with torch.cuda.device(device):
        built = {name: _compile(*entry, arch) for name, entry in entries.items()}
    launches = {name: launch for name, (launch, _) in built.items()}
    artifacts = {name: artifact for name, (_, artifact) in built.items() if name != "step"}
    return CompiledStep(batch, width, box, device, artifacts, **launches)


def cross_compile_step(
    batch: int,
    width: int,
    box: MailboxLayout,
    arch: str = "sm_90a",
    schedule: Schedule = BASE,
) -> dict[str, Artifact]:
    """A step's ``"exchange"``, ``"decode"`` and ``"merge"`` for an architecture, without a GPU.

    Args:
        batch: As :func:`compile_step`, with the other sizes.
        width: See there.
        box: See there.
        arch: As :func:`cross_compile`.
        schedule: Order of rounding.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arch(arch)
    entries = _step_entries(batch, width, box, schedule)
    return {name: _compile(*entry, arch)[1] for name, entry in entries.items() if name != "step"}


Entry = tuple[Callable[..., None], tuple[object, ...]]


def _compile(
    function: Callable[..., None], arguments: tuple[object, ...], arch: str
) -> tuple[Callable[..., None], Artifact]:
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), KeepCUBIN(), DumpDir(folder), EnableTVMFFI())
        launch = cute.compile[options](function, *arguments)
        return launch, Artifact(arch, launch.__ptx__, launch.__cubin__)


def _entry(kernel: SparseDcpDecode | LowLatencyDecode, cap: int) -> Entry:
    """What is compiled of the decode, and the types that it is called with.

    Static sizes, but for N and the lists' lengths.
    """
    batch, padded, width = kernel.batch, kernel.padded, kernel.width
    kv, rows, valid = _keys(width)
    scales = (Float32(1.0), Float32(1.0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if isinstance(kernel, SparseDcpDecode) and kernel.push is not None:
        return kernel.launch_push, (kv, rows, valid, *scales, _mail(), stream)
    query = _fake(Uint8, cap, padded, ROW_COLUMNS, align=16)
    latent = _fake(BFloat16, batch, padded, LATENT_COLUMNS, align=16)
    lse = _fake(Float32, batch, padded, align=4)
    return kernel, (query, kv, rows, valid, latent, lse, *scales, stream)


def _step_entries(
    batch: int, width: int, box: MailboxLayout, schedule: Schedule
) -> dict[str, Entry]:
    """What is compiled of a step, and the types that each is called with."""
    if not isinstance(box, MailboxLayout):
        raise TypeError(f"box is a {type(box).__name__}; it may be a MailboxLayout")
    check_schedule(schedule, "e4m3")
    push = (box.owner_heads, box.ranks, box.cap)
    decode = SparseDcpDecode(batch, box.heads, box.padded, width, push, schedule=schedule)
    step = DcpStep(decode, QueryExchange(batch, box), OwnerMerge(batch, box))
    query = _fake(Uint8, batch, box.owner_heads, ROW_COLUMNS, align=16)
    latent = _fake(BFloat16, batch, box.owner_heads, LATENT_COLUMNS, align=16)
    lse = _fake(Float32, batch, box.owner_heads, align=4)
    scales = (Float32(1.0), Float32(1.0))
    tail = (_mail(), make_fake_stream(use_tvm_ffi_env_stream=True))
    return {
        "exchange": (step.exchange, (query, *tail)),
        "decode": _entry(decode, box.cap),
        "merge": (step.merge, (latent, lse, *tail)),
        "step": (step, (query, *_keys(width), latent, lse, *scales, *tail)),
    }


def _keys(width: int) -> tuple[object, object, object]:
    """``kv``, ``rows`` and ``valid`` as types."""
    return (
        _fake(Uint8, cute.sym_int64(), ROW_COLUMNS, align=16),
        _fake(Int32, cute.sym_int64(), width, align=4),
        _fake(Int32, cute.sym_int64(), align=4),
    )


def _mail() -> DeviceMailbox:
    zero = Int64(0)
    return DeviceMailbox(zero, zero, zero, zero, zero, Int32(0))


def _fake(dtype: type, *shape: object, align: int) -> object:
    strides: list[int] = [1]
    for size in reversed(shape[1:]):
        assert isinstance(size, int)
        strides.insert(0, strides[0] * size)
    return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)


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
