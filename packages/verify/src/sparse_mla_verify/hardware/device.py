"""The GPU that a comparison asks: a `session.Device`."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs.gpu import host
from sparse_mla_verify.hardware import kernels
from sparse_mla_verify.hardware.arithmetic import OPERATIONS
from sparse_mla_verify.hardware.hashing import HEAD, HEADS, head_hashes
from sparse_mla_verify.hardware.instructions import INSTRUCTIONS, PROBLEMS, STEP_BYTES
from sparse_mla_verify.hardware.sweeps import SWEEPS

# Heads of one launch of a sweep: 256 MiB of results.
_HEADS_A_LAUNCH = 8

Words = NDArray[np.uint32]


class CudaDevice:
    """The current CUDA device.

    Raises:
        RuntimeError: it is not a Hopper GPU.
    """

    def __init__(self) -> None:
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            raise RuntimeError(f"the GPU must be of sm_90, got sm_{''.join(map(str, capability))}")
        self._launches: dict[str, Any] = {}

    def host(self) -> Host:
        """The GPU, the driver and the versions."""
        return host()

    def prepare(self, name: str) -> str:
        """Compile and load an operation; the hash of its machine code."""
        self._launches[name], artifact = kernels.build(name)
        return artifact.code_sha256

    def hashes(self, name: str) -> NDArray[np.uint64]:
        """A sweep's hash of every head [512], computed on the GPU."""
        out = torch.empty(_HEADS_A_LAUNCH * HEAD, dtype=torch.int32, device="cuda")
        found = []
        for head in range(0, HEADS, _HEADS_A_LAUNCH):
            self._sweep(name, head, out)
            found.append(head_hashes(out))
        return np.asarray(torch.cat(found).cpu().numpy()).view(np.uint64)

    def table(self, name: str, head: int) -> Words:
        """A sweep's words [2^23] for one head."""
        out = torch.empty(HEAD, dtype=torch.int32, device="cuda")
        self._sweep(name, head, out)
        return np.asarray(out.cpu().numpy()).view(np.uint32)

    def run(self, name: str, inputs: tuple[NDArray[Any], ...]) -> Words:
        """Results for one chunk, in the shape of the third input."""
        shape = inputs[2].shape
        if name in OPERATIONS:
            a, b, c = (_to_gpu(x, np.int32) for x in inputs)
            out = torch.empty_like(c)
            self._launches[name](a, b, c, out, out.numel() // kernels.THREADS)
            return np.asarray(out.cpu().numpy()).view(np.uint32).reshape(shape)
        assert name in INSTRUCTIONS
        a, b = (_to_gpu(x, np.int32) for x in inputs[:2])
        c = _to_gpu(inputs[2], np.float32)
        steps = inputs[0].shape[-1] // STEP_BYTES
        d = torch.full_like(c, float("nan"))
        self._launches[name](a, b, c, d, PROBLEMS, steps)
        return np.asarray(d.cpu().numpy()).view(np.uint32).reshape(shape)

    def _sweep(self, name: str, head: int, out: torch.Tensor) -> None:
        assert name in SWEEPS
        first = (head << 23) - (head // (HEADS // 2) << 32)  # as a signed integer
        self._launches[name](out, first, out.numel() // kernels.THREADS)


def _to_gpu(array: NDArray[Any], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(dtype).reshape(-1)).to("cuda")
