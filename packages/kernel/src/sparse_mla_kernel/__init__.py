"""Sparse MLA decode in one GPU kernel, whose output bits a CPU model predicts.

Start with :func:`sparse_decode`, which compiles, allocates and runs. :func:`compile_sparse` and
:func:`run_sparse` do the same in two steps, into tensors that the caller has. Under decode context
parallelism start with :class:`DcpMailbox` and :func:`dcp_decode`. :func:`schedule_for` and
:func:`sparse_for` say which schedule, and which kernel, is fastest for a batch.
"""

from __future__ import annotations

import importlib
from importlib import metadata as _metadata
from typing import TYPE_CHECKING

from sparse_mla_kernel.dcp.compile import CompiledStep, compile_step, cross_compile_step
from sparse_mla_kernel.host.artifact import Artifact
from sparse_mla_kernel.host.compile import (
    CompiledSparse,
    compile_sparse,
    cross_compile,
    precompile_sparse,
)
from sparse_mla_kernel.host.launch import run_sparse, sparse_decode
from sparse_mla_kernel.host.operator import decode_op
from sparse_mla_kernel.host.policy import parse_schedules, parse_table, schedule_for, sparse_for
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.schedule import BASE, LOW_LATENCY, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.dcp.run import (
        compile_dcp,
        dcp_decode,
        owner_merge,
        push_decode,
        query_exchange,
        run_dcp,
    )
    from sparse_mla_kernel.kernels.base.decode import SparseDcpDecode
    from sparse_mla_kernel.mailbox.memory import DcpMailbox, PeerTimeoutError
    from sparse_mla_kernel.mailbox.waits import Stage
    from sparse_mla_kernel.ptx.convert import transpose4
    from sparse_mla_kernel.ptx.shared_memory import store_fp8_pair_shared

try:
    __version__ = _metadata.version("sparse-mla-kernel")
except _metadata.PackageNotFoundError:  # The source is on the path, and the package not installed.
    __version__ = "0+unknown"

__all__ = [
    "BASE",
    "LOW_LATENCY",
    "Artifact",
    "CompiledSparse",
    "CompiledStep",
    "DcpMailbox",
    "MailboxLayout",
    "PeerTimeoutError",
    "Schedule",
    "SparseDcpDecode",
    "Stage",
    "compile_dcp",
    "compile_sparse",
    "compile_step",
    "cross_compile",
    "cross_compile_step",
    "dcp_decode",
    "decode_op",
    "owner_merge",
    "parse_schedules",
    "parse_table",
    "precompile_sparse",
    "push_decode",
    "query_exchange",
    "run_dcp",
    "run_sparse",
    "schedule_for",
    "sparse_decode",
    "sparse_for",
    "store_fp8_pair_shared",
    "transpose4",
]

#: The modules of the names that need the DSL. Its import takes seconds, so that each of these
#: modules is imported when its name is first used.
_NEEDS_DSL = {
    "DcpMailbox": "mailbox.memory",
    "PeerTimeoutError": "mailbox.memory",
    "SparseDcpDecode": "kernels.base.decode",
    "Stage": "mailbox.waits",
    "compile_dcp": "dcp.run",
    "dcp_decode": "dcp.run",
    "owner_merge": "dcp.run",
    "push_decode": "dcp.run",
    "query_exchange": "dcp.run",
    "run_dcp": "dcp.run",
    "store_fp8_pair_shared": "ptx.shared_memory",
    "transpose4": "ptx.convert",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_DSL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_DSL[name]}"), name)
    globals()[name] = value
    return value
