"""Compiling the kernel: for the GPU that is there, or for any architecture without one."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparse_mla_kernel import cache
from sparse_mla_kernel.checks import (
    architecture_of,
    check_arch,
    check_cap,
    check_geometry,
    check_push,
    check_schedule,
    resolve_device,
)
from sparse_mla_kernel.schedule import BASE, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.build import Entry
    from sparse_mla_kernel.mailbox import MailboxLayout

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

    What an earlier process compiled is read from disk (:mod:`sparse_mla_kernel.cache`).

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
    sizes, entry = _sparse_entry(batch, heads, padded, width, cap, push, schedule)
    launch, artifact = _obtain("decode", sizes, device, entry)
    return CompiledSparse(
        batch, heads, padded, width, cap, device, schedule, artifact, launch, push
    )


def _sparse_entry(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    push: Push | None,
    schedule: Schedule,
) -> tuple[dict[str, object], Callable[[], Entry]]:
    """What the cache knows the kernel by, and what makes what is compiled."""

    def entry() -> Entry:
        from sparse_mla_kernel import build

        kernel = build.decode_kernel(batch, heads, padded, width, push, schedule)
        return build.decode_entry(kernel, cap)

    sizes: dict[str, object] = {
        "batch": batch,
        "heads": heads,
        "padded": padded,
        "width": width,
        "cap": cap,
        "push": push,
        "schedule": asdict(schedule),
    }
    return sizes, entry


def precompile_sparse(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    arch: str,
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> bool:
    """Compile a kernel into the cache, for a later :func:`compile_sparse` on this machine.

    Nothing is loaded or launched: several processes may compile a kernel each, at once.

    Args:
        batch: As :func:`compile_sparse`, with the other sizes.
        heads: See there.
        padded: See there.
        width: See there.
        cap: See there.
        arch: As :func:`cross_compile`.
        push: See :func:`compile_sparse`.
        schedule: Order of rounding.

    Returns:
        Whether the cache has it now. Not if it is off or can't be written; then nothing is compiled
        in the first case, and nothing kept in the second.

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
    if cache.folder() is None:
        return False
    sizes, entry = _sparse_entry(batch, heads, padded, width, cap, push, schedule)
    inputs = cache.describe("decode", arch, sizes)
    return cache.holds(inputs) or _compiled(inputs, entry, arch)[2]


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
    """Compile the kernel for an architecture, on a machine with or without a GPU; reads no cache.

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
    from sparse_mla_kernel import build

    kernel = build.decode_kernel(batch, heads, padded, width, push, schedule)
    return _artifact(build.compile_entry(*build.decode_entry(kernel, cap), arch), arch)


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
    """Compile and load a step's kernels, or read them from disk, once a process and device.

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
    from sparse_mla_kernel.mailbox import MailboxLayout

    if not isinstance(box, MailboxLayout):
        raise TypeError(f"box is a {type(box).__name__}; it may be a MailboxLayout")
    check_schedule(schedule, "e4m3")

    def entry(name: str) -> Entry:
        from sparse_mla_kernel import build

        return build.step_entries(batch, width, box, schedule)[name]

    sizes = {
        "batch": batch,
        "width": width,
        "box": asdict(box),
        "schedule": asdict(schedule),
    }
    built = {
        name: _obtain(name, sizes, device, functools.partial(entry, name))
        for name in ("exchange", "decode", "merge", "step")
    }
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
    from sparse_mla_kernel import build

    entries = build.step_entries(batch, width, box, schedule)
    return {
        name: _artifact(build.compile_entry(*entry, arch), arch)
        for name, entry in entries.items()
        if name != "step"
    }


def _obtain(
    name: str, sizes: Mapping[str, object], device: torch.device, entry: Callable[[], Entry]
) -> tuple[Callable[..., None], Artifact]:
    """A kernel out of the cache, or else compiled and kept there.

    Args:
        name: Which entry point.
        sizes: All that it's compiled for, but for the architecture.
        device: Where it will run.
        entry: Makes what is compiled; not called, nor the DSL imported, if the cache has it.
    """
    arch = architecture_of(device)
    inputs = cache.describe(name, arch, sizes)
    found = cache.find(inputs)
    if found is None:
        from sparse_mla_kernel import build

        with torch.cuda.device(device):
            compiled, artifact, kept = _compiled(inputs, entry, arch)
        # What was kept is what runs: later processes do nothing that this one didn't.
        found = cache.find(inputs) if kept else None
        if found is None:
            return build.launcher(compiled), artifact
    return found.launch, Artifact(arch, found.ptx, found.cubin)


def _compiled(
    inputs: Mapping[str, object], entry: Callable[[], Entry], arch: str
) -> tuple[Any, Artifact, bool]:
    """What the DSL makes of an entry, its code, and whether the cache has kept it."""
    from sparse_mla_kernel import build

    compiled = build.compile_entry(*entry(), arch)
    artifact = _artifact(compiled, arch)
    kept = cache.folder() is not None and cache.keep(
        inputs, build.object_file(compiled), artifact.ptx, artifact.cubin
    )
    return compiled, artifact, kept


def _artifact(compiled: Any, arch: str) -> Artifact:
    return Artifact(arch, compiled.__ptx__, compiled.__cubin__)


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
