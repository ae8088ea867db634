"""Sparse MLA decode in plain PyTorch: gather, two batched products, a softmax."""

from __future__ import annotations

import functools
import math

import torch

from sparse_mla_verify.inputs.cases import COLUMNS, LATENT
from sparse_mla_verify.peers.implementation import Prepared
from sparse_mla_verify.peers.workload import Workload, padded_ids

LAUNCHES = 16  # of a graph: a decode is about ten kernels
LEAST_WIDTH = 16  # of a list, where there are fewer keys


def attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    *,
    scale_log2: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities `[B, H, W]` and values `[B, W, 512]` of `dtype`, and the LSE `[B, H]`.

    Arguments as of `decode`.
    """
    batch, width = rows.shape
    place = torch.arange(width, dtype=torch.int32, device=rows.device)
    live = (rows >= 0) & (rows < len(kv)) & (place < valid[:, None])
    ids = rows.masked_fill(~live, 0).flatten()
    keys = kv.index_select(0, ids).view(torch.float8_e4m3fn).to(dtype).view(batch, width, COLUMNS)
    logits = query.view(torch.float8_e4m3fn).to(dtype) @ keys.transpose(1, 2)
    softmax_dtype = torch.promote_types(dtype, torch.float32)
    scaled = logits.to(softmax_dtype) * (scale_log2 * math.log(2))
    scaled = scaled.masked_fill(~live[:, None], -torch.inf)
    # A row without keys has a NaN softmax, all of it dead.
    p = scaled.softmax(-1).masked_fill(~live[:, None], 0).to(dtype)
    return p, keys[..., :LATENT], scaled.logsumexp(-1)


def decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    *,
    scale_log2: float,
    out_scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode a batch, computing in `dtype` (the softmax at least in float32).

    query `[B, H, 576]` and kv `[N, 576]` are E4M3 bytes, rows `[B, W]` and valid `[B]` int32. An id
    outside `[0, N)` is masked (it reads row 0, which must be finite); a row without keys is 0 and
    -inf. Returns latent `[B, H, 512]` and lse `[B, H]`, natural log.
    """
    p, values, lse = attention(query, kv, rows, valid, scale_log2=scale_log2, dtype=dtype)
    return (p @ values) * out_scale, lse


class PyTorch:
    """`decode` in BF16, on lists as wide as the keys."""

    name = "pytorch"

    def prepare(self, work: Workload) -> Prepared:
        """One decode for each of the first sets."""
        launches = min(LAUNCHES, work.sets)
        rows = padded_ids(work.ids[:launches], max(work.peer_width, LEAST_WIDTH))
        shape = (launches, work.point.rows, work.point.heads, LATENT)
        latent = torch.empty(shape, dtype=torch.bfloat16, device=work.pool.device)
        calls = [functools.partial(_decode_into, latent[k], work, rows, k) for k in range(launches)]
        return Prepared(calls, latent, {"pytorch_launches": launches})


def _decode_into(latent: torch.Tensor, work: Workload, rows: torch.Tensor, k: int) -> None:
    p, values, _ = attention(
        work.query[k],
        work.pool.kv,
        rows[k],
        work.valid,
        scale_log2=work.scale_log2,
        dtype=torch.bfloat16,
    )
    # beta = 0: what the output held is not read.
    torch.baddbmm(latent, p, values, beta=0, alpha=work.out_scale, out=latent)
