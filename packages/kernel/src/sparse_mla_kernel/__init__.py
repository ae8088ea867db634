"""Sparse MLA decode under decode context parallelism: one predictable cluster kernel."""

from sparse_mla_kernel.api import decode_op, run_sparse, sparse_decode
from sparse_mla_kernel.compile import Artifact, CompiledSparse, compile_sparse, cross_compile
from sparse_mla_kernel.decode import SparseDcpDecode
from sparse_mla_kernel.policy import parse_table, sparse_for
from sparse_mla_kernel.primitives import store_fp8_pair_shared, transpose4
from sparse_mla_kernel.schedule import BASE, Schedule

__version__ = "0.1.0"

__all__ = [
    "BASE",
    "Artifact",
    "CompiledSparse",
    "Schedule",
    "SparseDcpDecode",
    "compile_sparse",
    "cross_compile",
    "decode_op",
    "parse_table",
    "run_sparse",
    "sparse_decode",
    "sparse_for",
    "store_fp8_pair_shared",
    "transpose4",
]
