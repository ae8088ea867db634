"""The floor: an empty kernel, launched as the base schedule is.

Its time is what every launch in a graph costs: the graph's edge (programmatic, like ours), the
start of as many clusters of as many CTAs of 512 threads, `griddepcontrol`, and their exit. The
kernel has no shared memory, no barrier, and no load or store. It does none of the decode's work.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import torch
from cutlass import Float32, Int32, cute
from cutlass.base_dsl.compiler import DumpDir, EnableTVMFFI, GPUArch, KeepPTX
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel.checks import architecture_of, resolve_device
from sparse_mla_verify.inputs.cases import HEAD_TILE
from sparse_mla_verify.peers.implementation import Prepared
from sparse_mla_verify.peers.workload import Workload

THREADS = 512  # of a CTA of the base schedule


class EmptyCluster:
    """A kernel of clusters of ``split`` CTAs that do nothing."""

    def __init__(self, split: int) -> None:
        self.split = split

    @cute.jit
    def __call__(self, mAny: cute.Tensor, ctas: Int32, batch: Int32, stream: object) -> None:
        """Launch ``ctas x batch`` CTAs; ``mAny`` is any tensor of the device, for its stream."""
        self.kernel().launch(
            grid=(ctas, batch, 1),
            block=(THREADS, 1, 1),
            cluster=(self.split, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self) -> None:
        """Wait for the predecessor, let the successor start, exit."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


@functools.cache
def compile_empty(split: int, arch: str) -> Callable[..., None]:
    """Compile, and on that architecture load, the empty kernel; its PTX is ``__ptx__``."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    tensor = make_fake_tensor(Float32, (1,), (1,), assumed_align=4)
    arguments = (tensor, Int32(1), Int32(1), stream)
    with tempfile.TemporaryDirectory() as folder:
        options = (GPUArch(arch), KeepPTX(), DumpDir(folder), EnableTVMFFI())
        compiled: Callable[..., None] = cute.compile[options](EmptyCluster(split), *arguments)
    return compiled


class Floor:
    """The empty kernel as an implementation, of a schedule's grid, cluster and attributes."""

    name = "floor"

    def __init__(self, device: torch.device | str, split: int) -> None:
        self.device = resolve_device(device)
        self.split = split

    def prepare(self, work: Workload) -> Prepared:
        """One launch a set."""
        with torch.cuda.device(self.device):
            launch = compile_empty(self.split, architecture_of(self.device))
        ctas = work.point.heads // HEAD_TILE * self.split
        anything = torch.empty(1, dtype=torch.float32, device=self.device)
        call = functools.partial(launch, anything, ctas, work.point.rows)
        return Prepared([call] * work.sets)
