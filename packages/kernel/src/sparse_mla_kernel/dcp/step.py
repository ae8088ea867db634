"""One step of decode under decode context parallelism: three kernels, no collective."""

from __future__ import annotations

from cutlass import Float32, cute

from sparse_mla_kernel.dcp.owner_merge import OwnerMerge
from sparse_mla_kernel.dcp.query_exchange import QueryExchange
from sparse_mla_kernel.kernels.base.decode import SparseDcpDecode
from sparse_mla_kernel.mailbox.device import DeviceMailbox


class DcpStep:
    """What one rank launches in a step, in stream order.

    Args:
        query_exchange: The query exchange.
        decode: The decode, in push mode, of the same batch and mailbox.
        owner_merge: The owner merge, likewise.
    """

    def __init__(
        self, query_exchange: QueryExchange, decode: SparseDcpDecode, owner_merge: OwnerMerge
    ) -> None:
        self.query_exchange = query_exchange
        self.decode = decode
        self.owner_merge = owner_merge

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
        self.query_exchange(mQuery, mail, stream)
        self.decode.push_decode(mKv, mRows, mValid, scale_log2, out_scale, mail, stream)
        self.owner_merge(mLatent, mLse, mail, stream)
