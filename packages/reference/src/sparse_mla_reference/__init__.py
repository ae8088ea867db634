"""Sparse MLA decode and its parts, predicted to the last bit on a CPU."""

from importlib import metadata as _metadata

from sparse_mla_reference import lse, machine, mailbox, schedule, ulp
from sparse_mla_reference.bounds import Bounds, bounds
from sparse_mla_reference.dcp import DcpOutput, Rank, dcp_step
from sparse_mla_reference.decode import CONTRACT, Steps, decode
from sparse_mla_reference.formats import bf16, e4m3, e5m2, fp16, minifloat
from sparse_mla_reference.instructions import float32, libdevice, mma_models, mufu, tensor_core
from sparse_mla_reference.instructions.fma import fma
from sparse_mla_reference.machine import IDEAL, SM90, SM100, SM103, SM120, Machine
from sparse_mla_reference.mailbox import Mailbox
from sparse_mla_reference.merge import merge_states
from sparse_mla_reference.owner_merge import owner_merge
from sparse_mla_reference.schedule import BASE, LOW_LATENCY, Schedule
from sparse_mla_reference.trace import Trace, first_difference, trace

try:
    __version__ = _metadata.version("sparse-mla-reference")
except _metadata.PackageNotFoundError:  # The source is on the path, and the package not installed.
    __version__ = "0+unknown"

__all__ = [
    "BASE",
    "CONTRACT",
    "IDEAL",
    "LOW_LATENCY",
    "SM90",
    "SM100",
    "SM103",
    "SM120",
    "Bounds",
    "DcpOutput",
    "Machine",
    "Mailbox",
    "Rank",
    "Schedule",
    "Steps",
    "Trace",
    "__version__",
    "bf16",
    "bounds",
    "dcp_step",
    "decode",
    "e4m3",
    "e5m2",
    "first_difference",
    "float32",
    "fma",
    "fp16",
    "libdevice",
    "lse",
    "machine",
    "mailbox",
    "merge_states",
    "minifloat",
    "mma_models",
    "mufu",
    "owner_merge",
    "schedule",
    "tensor_core",
    "trace",
    "ulp",
]
