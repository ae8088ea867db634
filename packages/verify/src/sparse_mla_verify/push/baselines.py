"""What a step is compared with: the same decode with collectives around it, in PyTorch.

Both gather the query heads of all ranks, run the decode in latent mode and merge over ranks:

* `AllToAll`: every rank sends each owner its rows and LSEs, and the owner merges them.
* `GatherScatter`, as vLLM does it: all ranks gather all LSEs, scale their own rows by the weight
  that follows, and reduce-scatter the BF16 rows.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from sparse_mla_kernel import CompiledSparse, run_sparse


@dataclass(frozen=True, eq=False)
class Local:
    """One rank's decode in latent mode over gathered heads, and its arguments."""

    kernel: CompiledSparse
    kv: torch.Tensor
    valid: torch.Tensor
    scale_log2: float
    out_scale: float

    def decode(self, query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[batch, heads, 512]` BF16 and natural LSEs `[batch, heads]`."""
        k = self.kernel
        latent = query.new_empty((k.batch, k.padded, 512), dtype=torch.bfloat16)
        lse = query.new_empty((k.batch, k.padded), dtype=torch.float32)
        scales = (self.scale_log2, self.out_scale)
        run_sparse(k, query, self.kv, rows, self.valid, latent, lse, *scales)
        return latent, lse


def gather_query(query: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[batch, H, 576]` of every rank as `[batch, D * H, 576]`."""
    batch, heads, columns = query.shape
    gathered = query.new_empty((ranks * batch, heads, columns))
    dist.all_gather_into_tensor(gathered, query)
    return gathered.unflatten(0, (ranks, batch)).transpose(0, 1).flatten(1, 2)


def to_owners(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[batch, D * H, ...]` as `[D, batch, H, ...]`, contiguous."""
    return x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()


def merge(rows: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `[D, batch, H, 512]` BF16 rows by their natural LSEs; zeros where all are empty."""
    total = torch.logsumexp(lse, dim=0)
    weight = torch.exp(lse - total).nan_to_num_(0.0)
    merged = (weight.unsqueeze(-1) * rows.float()).sum(dim=0)
    return merged.to(torch.bfloat16), total


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Decode, all-to-all of rows and LSEs, merge."""

    local: Local
    ranks: int

    def step(self, query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step on this rank's heads, `[batch, H, 576]`."""
        latent, lse = self.local.decode(gather_query(query, self.ranks), rows)
        sent, sent_lse = to_owners(latent, self.ranks), to_owners(lse, self.ranks)
        got, got_lse = torch.empty_like(sent), torch.empty_like(sent_lse)
        dist.all_to_all_single(got, sent)
        dist.all_to_all_single(got_lse, sent_lse)
        return merge(got, got_lse)


@dataclass(frozen=True, eq=False)
class GatherScatter:
    """Decode, all-gather of LSEs, scaling, reduce-scatter of BF16 rows."""

    local: Local
    ranks: int

    def step(self, query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step on this rank's heads, `[batch, H, 576]`."""
        latent, lse = self.local.decode(gather_query(query, self.ranks), rows)
        every = lse.new_empty((self.ranks * len(lse), lse.shape[1]))
        dist.all_gather_into_tensor(every, lse)
        total = torch.logsumexp(every.unflatten(0, (self.ranks, -1)), dim=0)
        weight = torch.exp(lse - total).nan_to_num_(0.0)
        scaled = (weight.unsqueeze(-1) * latent.float()).to(torch.bfloat16)
        sent = to_owners(scaled, self.ranks)
        out = torch.empty_like(sent[0])
        dist.reduce_scatter_tensor(out, sent.flatten(0, 1))
        own = total.unflatten(1, (self.ranks, -1))[:, dist.get_rank()]
        return out, own.contiguous()
