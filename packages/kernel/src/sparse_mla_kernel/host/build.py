"""What is compiled, and compiling it: the part of :mod:`compile` that needs the DSL.

Importing the DSL takes seconds. A process that finds its kernels in the cache does without.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.base_dsl.compiler import DumpDir, EnableTVMFFI, GPUArch, KeepCUBIN, KeepPTX
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel.checks import check_schedule
from sparse_mla_kernel.host import cache
from sparse_mla_kernel.kernels.base.decode import SparseDcpDecode
from sparse_mla_kernel.kernels.launch import DecodeKernel
from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.registry import LATENT, PUSH
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, Schedule

Push = tuple[int, int, int]


def decode_kernel(
    batch: int, heads: int, padded: int, width: int, push: Push | None, schedule: Schedule
) -> DecodeKernel:
    """The kernel that runs a schedule.

    Raises:
        TypeError: A size is no int.
        ValueError: A size is out of range, or the schedule's kernel has no push mode.
    """
    check_schedule(schedule, mode=LATENT if push is None else PUSH)
    entry = schedule.entry
    module = importlib.import_module(f"sparse_mla_kernel.kernels.{entry.folder}.decode")
    arguments = (batch, heads, padded, width) + (() if push is None else (push,))
    kernel: DecodeKernel = getattr(module, entry.decode)(*arguments, schedule=schedule)
    return kernel


Entry = tuple[Callable[..., None], tuple[object, ...]]


def compile_entry(function: Callable[..., None], arguments: tuple[object, ...], arch: str) -> Any:
    """What the DSL makes of an entry: with ``__ptx__``, ``__cubin__``, and without a GPU too."""
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), KeepCUBIN(), DumpDir(folder), EnableTVMFFI())
        return cute.compile[options](function, *arguments)


def launcher(compiled: Any) -> Callable[..., None]:
    """The TVM-FFI function itself, without the DSL's wrapper for keyword arguments."""
    own = isinstance(compiled, tvm_ffi.Function)  # an entry without keywords has no wrapper
    function: Callable[..., None] = compiled if own else compiled.__tvm_ffi_object__()
    return function


def object_file(compiled: Any) -> bytes:
    """The launcher and its cubin as an object file that exports ``cache.FUNCTION``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launcher.o"
        compiled.export_to_c(str(path), cache.FUNCTION, export_only_tvm_ffi_symbols=True)
        return path.read_bytes()


def decode_entry(kernel: DecodeKernel, cap: int) -> Entry:
    """What is compiled of the decode, and the types that it is called with.

    Static sizes, but for N and the lists' lengths.
    """
    batch, padded, width = kernel.batch, kernel.padded, kernel.width
    kv, rows, valid = key_tensors(width)
    scales = (Float32(1.0), Float32(1.0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if isinstance(kernel, SparseDcpDecode) and kernel.push is not None:
        return kernel.launch_push, (kv, rows, valid, *scales, fake_mailbox(), stream)
    query = fake(Uint8, cap, padded, ROW_COLUMNS, align=16)
    latent = fake(BFloat16, batch, padded, LATENT_COLUMNS, align=16)
    lse = fake(Float32, batch, padded, align=4)
    return kernel, (query, kv, rows, valid, latent, lse, *scales, stream)


def key_tensors(width: int) -> tuple[object, object, object]:
    """The cache, the row lists and the counts as types."""
    return (
        fake(Uint8, cute.sym_int64(), ROW_COLUMNS, align=16),
        fake(Int32, cute.sym_int64(), width, align=4),
        fake(Int32, cute.sym_int64(), align=4),
    )


def fake_mailbox() -> DeviceMailbox:
    """A mailbox as a type."""
    zero = Int64(0)
    return DeviceMailbox(zero, zero, zero, zero, zero, Int32(0))


def fake(dtype: type, *shape: object, align: int) -> object:
    """A contiguous tensor as a type: sizes that are ints are static."""
    strides: list[int] = [1]
    for size in reversed(shape[1:]):
        assert isinstance(size, int)
        strides.insert(0, strides[0] * size)
    return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)
