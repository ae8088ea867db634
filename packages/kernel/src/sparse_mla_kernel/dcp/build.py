"""What is compiled of a step, and the types that each kernel is called with."""

from __future__ import annotations

from cutlass import BFloat16, Float32, Uint8
from cutlass.runtime import make_fake_stream

from sparse_mla_kernel.checks import check_schedule
from sparse_mla_kernel.dcp.owner_merge import OwnerMerge
from sparse_mla_kernel.dcp.query_exchange import QueryExchange
from sparse_mla_kernel.dcp.step import DcpStep
from sparse_mla_kernel.host.build import Entry, decode_entry, fake, fake_mailbox, key_tensors
from sparse_mla_kernel.kernels.base.decode import SparseDcpDecode
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.registry import PUSH
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, Schedule


def step_entries(
    batch: int, width: int, box: MailboxLayout, schedule: Schedule
) -> dict[str, Entry]:
    """What is compiled of a step, and the types that each is called with."""
    check_schedule(schedule, mode=PUSH)
    push = (box.owner_heads, box.ranks, box.cap)
    decode = SparseDcpDecode(batch, box.heads, box.padded, width, push, schedule=schedule)
    step = DcpStep(QueryExchange(batch, box), decode, OwnerMerge(batch, box))
    query = fake(Uint8, batch, box.owner_heads, ROW_COLUMNS, align=16)
    latent = fake(BFloat16, batch, box.owner_heads, LATENT_COLUMNS, align=16)
    lse = fake(Float32, batch, box.owner_heads, align=4)
    scales = (Float32(1.0), Float32(1.0))
    tail = (fake_mailbox(), make_fake_stream(use_tvm_ffi_env_stream=True))
    return {
        "query_exchange": (step.query_exchange, (query, *tail)),
        "push_decode": decode_entry(decode, box.cap),
        "owner_merge": (step.owner_merge, (latent, lse, *tail)),
        "step": (step, (query, *key_tensors(width), latent, lse, *scales, *tail)),
    }
