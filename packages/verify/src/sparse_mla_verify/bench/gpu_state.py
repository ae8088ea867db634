"""The GPU's clocks and what else a run's figures depend on; everything is only read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import torch

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

FIELDS = ("clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def sm_mhz() -> int | None:
    """The clock of the SMs now, by NVML or nvidia-smi; None where neither tells."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # no NVML binding, no NVML, or an error of the binding's own types
        clock = query(["clocks.sm"], own_gpu()).get("clocks.sm", "")
        return int(clock) if clock.isdigit() else None


def own_gpu() -> str:
    """The current device's name for nvidia-smi, whose numbering is not PyTorch's."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"


def query(fields: Sequence[str], gpu: str, run: Runner = subprocess.run) -> dict[str, str]:
    """Fields of `nvidia-smi --query-gpu` of a GPU, in its units; {} where it doesn't tell."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}"]
    try:
        done = run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
