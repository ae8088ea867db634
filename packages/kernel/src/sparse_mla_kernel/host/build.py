"""What the DSL compiles, and the call that compiles it.

This module imports the DSL, which takes seconds. :mod:`sparse_mla_kernel.host.compile` imports this
module only when it has to compile: a process that finds its kernels in the cache never does.
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
from sparse_mla_kernel.host.sizes import Push
from sparse_mla_kernel.kernels.base.decode import SparseDcpDecode
from sparse_mla_kernel.kernels.launch import DecodeKernel
from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, Schedule
from sparse_mla_kernel.schedule.registry import LATENT, PUSH


def decode_kernel(
    batch: int, heads: int, padded: int, width: int, push: Push | None, schedule: Schedule
) -> DecodeKernel:
    """The kernel that runs a schedule.

    Args:
        batch: Decode rows.
        heads: Query heads that are used.
        padded: Query heads that a row of the query has.
        width: Row ids that a row's list holds.
        push: ``(owner_heads, ranks, cap)`` for push mode; None for latent mode.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is out of range, or the schedule's kernel has no push mode.
    """
    check_schedule(schedule, mode=LATENT if push is None else PUSH)
    entry = schedule.entry
    module = importlib.import_module(f"sparse_mla_kernel.kernels.{entry.folder}.decode")
    arguments = (batch, heads, padded, width) + (() if push is None else (push,))
    kernel: DecodeKernel = getattr(module, entry.decode)(*arguments, schedule=schedule)
    return kernel


#: A jitted function, and the types that it is called with.
Entry = tuple[Callable[..., None], tuple[object, ...]]


def compile_entry(function: Callable[..., None], arguments: tuple[object, ...], arch: str) -> Any:
    """Compile an entry; needs no GPU. The result has its code in ``__ptx__`` and ``__cubin__``."""
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), KeepCUBIN(), DumpDir(folder), EnableTVMFFI())
        return cute.compile[options](function, *arguments)


def launcher(compiled: Any) -> Callable[..., None]:
    """The TVM-FFI function itself, without the DSL's wrapper for keyword arguments."""
    own = isinstance(compiled, tvm_ffi.Function)  # the DSL wraps only entries that take keywords
    function: Callable[..., None] = compiled if own else compiled.__tvm_ffi_object__()
    return function


def object_file(compiled: Any) -> bytes:
    """The launcher and its cubin as an object file that exports ``cache.FUNCTION``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launcher.o"
        compiled.export_to_c(str(path), cache.FUNCTION, export_only_tvm_ffi_symbols=True)
        return path.read_bytes()


def decode_entry(kernel: DecodeKernel, cap: int) -> Entry:
    """A decode kernel's jitted function, and the types that it is called with.

    All sizes are static, but for the number of cache rows and the lengths of ``rows`` and
    ``valid``.

    Args:
        kernel: The kernel.
        cap: Rows of the q mailbox.
    """
    batch, padded, width = kernel.batch, kernel.padded, kernel.width
    kv, rows, valid = key_tensors(width)
    scales = (Float32(1.0), Float32(1.0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if isinstance(kernel, SparseDcpDecode) and kernel.push is not None:
        return kernel.push_decode, (kv, rows, valid, *scales, fake_mailbox(), stream)
    query = fake(Uint8, cap, padded, ROW_COLUMNS, align=16)
    latent = fake(BFloat16, batch, padded, LATENT_COLUMNS, align=16)
    lse = fake(Float32, batch, padded, align=4)
    return kernel, (query, kv, rows, valid, latent, lse, *scales, stream)


def key_tensors(width: int) -> tuple[object, object, object]:
    """The types of the cache rows, the row lists and the counts."""
    return (
        fake(Uint8, cute.sym_int64(), ROW_COLUMNS, align=16),
        fake(Int32, cute.sym_int64(), width, align=4),
        fake(Int32, cute.sym_int64(), align=4),
    )


def fake_mailbox() -> DeviceMailbox:
    """The type of a mailbox."""
    zero = Int64(0)
    return DeviceMailbox(zero, zero, zero, zero, zero, Int32(0))


def fake(dtype: type, *shape: object, align: int) -> object:
    """The type of a contiguous tensor; a size that is an int is static."""
    strides: list[int] = [1]
    for size in reversed(shape[1:]):
        assert isinstance(size, int)
        strides.insert(0, strides[0] * size)
    return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)
