"""D emulated ranks on one GPU: the same kernels and the same layout as between GPUs."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sparse_mla_kernel import (
    CompiledStep,
    DcpMailbox,
    MailboxLayout,
    compile_dcp,
    owner_merge,
    push_decode,
    query_exchange,
    run_dcp,
)
from sparse_mla_verify.gpu_runs.gpu import on_device
from sparse_mla_verify.measure.bits import Comparison, compare_bits
from sparse_mla_verify.measure.poisoned import POISONS
from sparse_mla_verify.push.step_inputs import StepBits, StepCase

TIMEOUT_S = 5.0


class RankInputs:
    """One rank's arguments of a step, on its device."""

    def __init__(self, case: StepCase, rank: int, device: torch.device | str) -> None:
        self.query = on_device(case.query[rank], device).view(torch.uint8)
        self.kv = on_device(case.kv[rank], device).view(torch.uint8)
        self.rows = on_device(case.rows[rank], device)
        self.valid = on_device(case.valid[rank], device)
        self.scales = (case.scale_log2, case.out_scale)

    def clone(self) -> "RankInputs":
        """A copy with memory of its own."""
        other = copy.copy(self)
        for name in ("query", "kv", "rows", "valid"):
            setattr(other, name, getattr(self, name).clone())
        return other

    def copy_(self, other: "RankInputs") -> None:
        """Take over another step's data; scales must be the same."""
        if self.scales != other.scales:
            raise ValueError(f"other's scales must be {self.scales}, got {other.scales}")
        for name in ("query", "kv", "rows", "valid"):
            getattr(self, name).copy_(getattr(other, name))

    @property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`kv`, `rows`, `valid`."""
        return self.kv, self.rows, self.valid


class RankOutputs:
    """One rank's results of a step, poisoned."""

    def __init__(self, batch: int, owner_heads: int, device: torch.device | str) -> None:
        self.latent = torch.empty(batch, owner_heads, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(batch, owner_heads, dtype=torch.float32, device=device)
        self.poison()

    def poison(self) -> None:
        """Fill with an encoding that no merge gives."""
        latent, lse = POISONS["NaN"]
        self.latent.view(torch.int16).fill_(latent)
        self.lse.view(torch.int32).fill_(lse)


def run_fused(
    kernels: CompiledStep, mailbox: DcpMailbox, given: RankInputs, out: RankOutputs
) -> None:
    """One rank's whole step in one launch, on the current stream."""
    keys, scales = given.keys, given.scales
    run_dcp(kernels, mailbox, given.query, *keys, out.latent, out.lse, *scales)


class Group:
    """The ranks' mailboxes and kernels for one batch shape."""

    def __init__(
        self,
        ranks: int,
        owner_heads: int,
        batch: int,
        width: int,
        *,
        cap: int | None = None,
        padded: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.batch = batch
        self.mailboxes = DcpMailbox.emulated(
            ranks, owner_heads, batch if cap is None else cap, padded, timeout_s=timeout_s
        )
        self.kernels = compile_dcp(self.mailboxes[0], batch, width)

    @property
    def box(self) -> MailboxLayout:
        """The mailboxes' layout."""
        return self.mailboxes[0].box

    def inputs(self, case: StepCase) -> list[RankInputs]:
        """A case on the device, an entry a rank."""
        return [RankInputs(case, r, "cuda") for r in range(self.box.ranks)]

    def outputs(self) -> list[RankOutputs]:
        """Poisoned results, an entry a rank."""
        sizes = (self.batch, self.box.owner_heads)
        return [RankOutputs(*sizes, "cuda") for _ in self.mailboxes]

    def step(
        self,
        inputs: Sequence[RankInputs],
        outputs: Sequence[RankOutputs],
        order: Sequence[int] | None = None,
    ) -> None:
        """One step of every rank on the current stream, stage by stage, ranks in `order`."""
        turns = range(len(self.mailboxes)) if order is None else order
        for r in turns:
            query_exchange(self.kernels, self.mailboxes[r], inputs[r].query)
        for r in turns:
            mailbox, given = self.mailboxes[r], inputs[r]
            push_decode(self.kernels, mailbox, *given.keys, *given.scales)
        for r in turns:
            owner_merge(self.kernels, self.mailboxes[r], outputs[r].latent, outputs[r].lse)

    def step_side_by_side(
        self,
        inputs: Sequence[RankInputs],
        outputs: Sequence[RankOutputs],
        streams: Sequence[torch.cuda.Stream],
    ) -> None:
        """One step, each rank on its own stream in one launch: the GPU has room for all of them."""
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                run_fused(self.kernels, self.mailboxes[r], inputs[r], outputs[r])

    def check(self) -> None:
        """Raise if any rank's wait was lost."""
        for mailbox in self.mailboxes:
            mailbox.check()

    def reset(self) -> None:
        """Empty every mailbox."""
        for mailbox in self.mailboxes:
            mailbox.reset()

    def dropped(self) -> NDArray[np.int32]:
        """`[D, D]` int32: rows that an owner (first axis) missed of each rank since the reset."""
        return np.stack([m.dropped().cpu().numpy() for m in self.mailboxes])

    def unarmed(self) -> int:
        """Words that are not their sentinel: 0 between two steps."""
        total = 0
        for m in self.mailboxes:
            for region, word in ((m.query, -1), (m.payload, -(2**31)), (m.lse, -1)):
                words = region.reshape(-1).view(torch.int32)
                total += int((words != word).sum().item())
        return total


def compare_step(what: str, outputs: Sequence[RankOutputs], expected: StepBits) -> list[Comparison]:
    """All ranks' results, bit for bit."""
    latent = np.stack([o.latent.view(torch.int16).cpu().numpy().view(np.uint16) for o in outputs])
    lse = np.stack([o.lse.view(torch.int32).cpu().numpy().view(np.uint32) for o in outputs])
    return [
        compare_bits(f"{what}, latent", latent, expected.latent),
        compare_bits(f"{what}, lse", lse, expected.lse),
    ]
