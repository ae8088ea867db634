"""The kernel's side: cases on a GPU, through the public functions of the kernel package."""

import datetime
import platform
from importlib import metadata
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparse_mla_kernel import Artifact, compile_sparse, run_sparse
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.inputs.cases import Case, Signature
from sparse_mla_verify.inputs.schedules import kernel_schedule


def device_name() -> str | None:
    """The GPU that is there, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def host() -> Host:
    """The GPU, the driver and the versions, as recordings name them."""
    major, minor = torch.cuda.get_device_capability()
    return Host(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        gpu=torch.cuda.get_device_name(),
        gpu_count=torch.cuda.device_count(),
        arch=f"sm_{major}{minor}",
        driver=_driver(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        dsl=_version("nvidia-cutlass-dsl"),
        tvm_ffi=_version("apache-tvm-ffi"),
        numpy=np.__version__,
    )


def _driver() -> str:
    """The driver's version, by NVML, which PyTorch may have no binding for."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, 96):
        return "unknown"
    return version.value.decode()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def on_device(array: NDArray[Any], device: str) -> torch.Tensor:
    """A copy of a read-only array on the device, as the signed type of the same width."""
    signed = np.ascontiguousarray(array).view(array.dtype.str.replace("u", "i"))
    return torch.from_numpy(signed.copy()).to(device)


class Inputs:
    """A case's inputs on the device, and the launch of the kernel that is compiled for it."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case = case
        self.device = device
        self.kernel = compile_sparse(
            *signature_arguments(case.signature), device, schedule=kernel_schedule(case.schedule)
        )
        self.query = on_device(case.query, device).view(torch.uint8)
        self.kv = on_device(case.kv, device).view(torch.uint8)
        self.rows = on_device(case.rows, device)
        self.valid = on_device(case.valid, device)

    def launch(self, latent: torch.Tensor, lse: torch.Tensor) -> None:
        """Run on the current stream into latent `[batch, padded, 512]` and lse `[batch, padded]`.

        They may be of any type of the right width.
        """
        run_sparse(
            self.kernel,
            self.query,
            self.kv,
            self.rows,
            self.valid,
            latent.view(torch.bfloat16),
            lse.view(torch.float32),
            self.case.scale_log2,
            self.case.out_scale,
        )


def signature_arguments(signature: Signature) -> tuple[int, int, int, int, int]:
    """A signature's sizes as `compile_sparse` takes them."""
    return (signature.batch, signature.heads, signature.padded, signature.width, signature.cap)


class GpuRunner:
    """The `Runner` of a GPU; keeps what it compiled for every signature that it ran."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.artifacts: dict[str, Artifact] = {}
        self._inputs: Inputs | None = None

    def __call__(self, case: Case, latent: NDArray[np.uint16], lse: NDArray[np.uint32]) -> None:
        """Decode a case into buffers of encodings, in place."""
        if self._inputs is None or self._inputs.case is not case:
            self._inputs = Inputs(case, self.device)
            self.artifacts[case.signature.key] = self._inputs.kernel.artifact
        out_latent, out_lse = on_device(latent, self.device), on_device(lse, self.device)
        self._inputs.launch(out_latent[: case.batch], out_lse[: case.batch])
        latent[...] = out_latent.cpu().numpy().view(np.uint16)
        lse[...] = out_lse.cpu().numpy().view(np.uint32)
