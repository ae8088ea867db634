"""Whether there is a GPU, asked without an error where PyTorch is missing."""

import sys


def gpu_name() -> str | None:
    """The GPU's name; None without a GPU, and where PyTorch or the kernel can't be imported."""
    try:
        from sparse_mla_verify.gpu_runs.gpu import device_name
    except ImportError:
        return None
    return device_name()


def lacks_gpu(command: str) -> bool:
    """Whether there is no GPU; the standard error is then told that the command needs one."""
    if gpu_name() is not None:
        return False
    print(f"{command} needs an NVIDIA GPU and PyTorch with CUDA", file=sys.stderr)
    return True
