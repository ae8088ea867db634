"""One step of decode under decode context parallelism: three kernels, no collective."""

from __future__ import annotations

from cutlass import Float32, cute

from sparse_mla_kernel.decode import SparseDcpDecode
from sparse_mla_kernel.mailbox import DeviceMailbox
from sparse_mla_kernel.owner_merge import OwnerMerge
from sparse_mla_kernel.query_exchange import QueryExchange


class DcpStep:
    """What one rank launches in a step, in stream order.

    Args:
        decode: The decode, in push mode.
        exchange: The query exchange of the same batch and mailbox.
        merge: The owner merge of the same batch and mailbox.
    """

    def __init__(self, decode: SparseDcpDecode, exchange: QueryExchange, merge: OwnerMerge) -> None:
        self.decode = decode
        self.exchange = exchange
        self.merge = merge

    @cute.jit
    def __call__(
        self,
        mQuery: cute.Tensor,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
        mail: DeviceMailbox,
        stream: object,
    ) -> None:
        """Launch all three on ``stream``; arguments as theirs.

        Args:
            mQuery: ``[batch, owner_heads, 576]`` E4M3 bytes, this rank's heads.
            mKv: ``[N, 576]`` E4M3 bytes, this rank's cache rows.
            mRows: ``[>= batch, width]`` int32.
            mValid: ``[>= batch]`` int32.
            mLatent: ``[batch, owner_heads, 512]`` BF16, out, over the keys of all ranks.
            mLse: ``[batch, owner_heads]`` f32, out, natural log.
            scale_log2: Softmax scale x tensor scales x log2(e).
            out_scale: The V scale.
            mail: This rank's mailbox.
            stream: A DSL stream handle.
        """
        self.exchange(mQuery, mail, stream)
        self.decode.launch_push(mKv, mRows, mValid, scale_log2, out_scale, mail, stream)
        self.merge(mLatent, mLse, mail, stream)
