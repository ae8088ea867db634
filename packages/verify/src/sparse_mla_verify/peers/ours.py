"""Our kernel, by a schedule."""

from __future__ import annotations

import functools
from dataclasses import fields

import torch

from sparse_mla_kernel import CompiledSparse, Schedule, compile_sparse, run_sparse
from sparse_mla_verify.inputs.cases import LATENT, Signature
from sparse_mla_verify.peers.implementation import Prepared
from sparse_mla_verify.peers.workload import Workload


class Sparse:
    """`run_sparse`, of a schedule."""

    def __init__(self, name: str, schedule: Schedule) -> None:
        self.name = name
        self.schedule = schedule
        self.machine_code: dict[str, str] = {}  # signature -> SHA-256

    def kernel(self, rows: int, heads: int, width: int, device: torch.device) -> CompiledSparse:
        """The kernel for a batch shape, of a mailbox of as many rows and heads."""
        signature = Signature(rows, heads, heads, width, rows)
        kernel = compile_sparse(rows, heads, heads, width, rows, device, schedule=self.schedule)
        self.machine_code[signature.key] = kernel.artifact.code_sha256
        return kernel

    def prepare(self, work: Workload) -> Prepared:
        """One launch a set; outputs of their own for each."""
        point = work.point
        kernel = self.kernel(point.rows, point.heads, work.width, work.pool.device)
        shape = (work.sets, point.rows, point.heads)
        latent = torch.empty((*shape, LATENT), dtype=torch.bfloat16, device=work.pool.device)
        lse = torch.empty(shape, dtype=torch.float32, device=work.pool.device)
        calls = [
            functools.partial(
                run_sparse,
                kernel,
                work.query[k],
                work.pool.kv,
                work.rows[k],
                work.valid,
                latent[k],
                lse[k],
                work.scale_log2,
                work.out_scale,
            )
            for k in range(work.sets)
        ]
        return Prepared(calls, latent)


def parse_schedule(text: str) -> Schedule:
    """Read a schedule as `"split=8,chunk=64"`; fields left out are the base schedule's.

    Raises ValueError for an unknown field, a value of the wrong form or out of range.
    """
    kinds = {f.name: type(getattr(Schedule(), f.name)) for f in fields(Schedule)}
    chosen: dict[str, object] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = entry.partition("=")
        if name not in kinds:
            raise ValueError(f"schedule's fields must be of {', '.join(kinds)}, got {name!r}")
        if kinds[name] is bool:
            if value not in ("true", "false"):
                raise ValueError(f"schedule's {name} must be true or false, got {value!r}")
            chosen[name] = value == "true"
        else:
            try:
                chosen[name] = kinds[name](value)
            except ValueError:
                kind = kinds[name].__name__
                raise ValueError(f"schedule's {name} must be of {kind}, got {value!r}") from None
    return Schedule(**chosen)  # type: ignore[arg-type]
