"""Sparse MLA decode under decode context parallelism: one predictable cluster kernel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sparse_mla_kernel.api import decode_op, run_sparse, sparse_decode
from sparse_mla_kernel.compile import (
    Artifact,
    CompiledSparse,
    CompiledStep,
    compile_sparse,
    compile_step,
    cross_compile,
    cross_compile_step,
    precompile_sparse,
)
from sparse_mla_kernel.policy import parse_schedules, parse_table, schedule_for, sparse_for
from sparse_mla_kernel.schedule import BASE, LOW_LATENCY, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.dcp import (
        compile_dcp,
        dcp_decode,
        exchange_query,
        merge_partials,
        push_decode,
        run_dcp,
    )
    from sparse_mla_kernel.dcp_mailbox import DcpMailbox, PeerTimeoutError
    from sparse_mla_kernel.decode import SparseDcpDecode
    from sparse_mla_kernel.mailbox import MailboxLayout
    from sparse_mla_kernel.primitives import store_fp8_pair_shared, transpose4
    from sparse_mla_kernel.waits import Stage

__version__ = "0.1.0"

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
    "exchange_query",
    "merge_partials",
    "parse_schedules",
    "parse_table",
    "precompile_sparse",
    "push_decode",
    "run_dcp",
    "run_sparse",
    "schedule_for",
    "sparse_decode",
    "sparse_for",
    "store_fp8_pair_shared",
    "transpose4",
]

#: Where the names are that need the DSL, whose import takes seconds: imported when they are used.
_NEEDS_DSL = {
    "DcpMailbox": "dcp_mailbox",
    "MailboxLayout": "mailbox",
    "PeerTimeoutError": "dcp_mailbox",
    "SparseDcpDecode": "decode",
    "Stage": "waits",
    "compile_dcp": "dcp",
    "dcp_decode": "dcp",
    "exchange_query": "dcp",
    "merge_partials": "dcp",
    "push_decode": "dcp",
    "run_dcp": "dcp",
    "store_fp8_pair_shared": "primitives",
    "transpose4": "primitives",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_DSL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NEEDS_DSL[name]}"), name)
    globals()[name] = value
    return value
