"""Compiling the kernels of a step under decode context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from sparse_mla_kernel.checks import check_arch, check_schedule, kind_of
from sparse_mla_kernel.host.artifact import Artifact
from sparse_mla_kernel.host.compile import artifact_of, obtain
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.schedule import BASE, Schedule
from sparse_mla_kernel.schedule.registry import PUSH

if TYPE_CHECKING:
    from sparse_mla_kernel.host.build import Entry


@dataclass(frozen=True)
class CompiledStep:
    """The kernels of one step under decode context parallelism, loaded, and their sizes.

    Args:
        batch: Decode rows.
        width: Row ids that a row's list holds.
        box: The mailbox's layout.
        device: The CUDA device that the kernels are loaded on.
        artifacts: What the compiler made of each kernel, by the kernel's name:
            ``"query_exchange"``, ``"push_decode"``, ``"owner_merge"``.
        query_exchange: Launches the query exchange.
        push_decode: Launches the decode with push.
        owner_merge: Launches the owner merge.
        step: Launches all three kernels in one call.
    """

    batch: int
    width: int
    box: MailboxLayout
    device: torch.device
    artifacts: Mapping[str, Artifact]
    query_exchange: Callable[..., None]
    push_decode: Callable[..., None]
    owner_merge: Callable[..., None]
    step: Callable[..., None]


@functools.cache
def compile_step(
    batch: int, width: int, box: MailboxLayout, device: torch.device, schedule: Schedule = BASE
) -> CompiledStep:
    """Compile and load a step's kernels, or read them from disk: once a process, device and shape.

    Args:
        batch: Decode rows, at most ``box.cap``.
        width: Row ids that a row's list holds.
        box: The mailbox's layout.
        device: A CUDA device.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernels.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    _check(box, schedule)

    def entry(name: str) -> Entry:
        from sparse_mla_kernel.dcp.build import step_entries

        return step_entries(batch, width, box, schedule)[name]

    sizes = {
        "batch": batch,
        "width": width,
        "box": asdict(box),
        "schedule": asdict(schedule),
    }
    built = {
        name: obtain(name, sizes, device, functools.partial(entry, name))
        for name in ("query_exchange", "push_decode", "owner_merge", "step")
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
    """Compile a step's kernels for an architecture, on a computer with or without a GPU.

    Args:
        batch: Decode rows, at most ``box.cap``.
        width: Row ids that a row's list holds.
        box: The mailbox's layout.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"sm_120a"``.
        schedule: The order of rounding.

    Returns:
        What the compiler made of each kernel, by the kernel's name: ``"query_exchange"``,
        ``"push_decode"``, ``"owner_merge"``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """
    _check(box, schedule)
    check_arch(arch)
    from sparse_mla_kernel.dcp.build import step_entries
    from sparse_mla_kernel.host.build import compile_entry

    entries = step_entries(batch, width, box, schedule)
    return {
        name: artifact_of(compile_entry(*entry, arch), arch)
        for name, entry in entries.items()
        if name != "step"
    }


def _check(box: MailboxLayout, schedule: Schedule) -> None:
    """Raise unless a step can be compiled for this mailbox and schedule."""
    if not isinstance(box, MailboxLayout):
        raise TypeError(f"box must be a MailboxLayout, got {kind_of(box)}")
    check_schedule(schedule, mode=PUSH)
