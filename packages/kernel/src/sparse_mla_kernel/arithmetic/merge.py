"""The merge of partials, one number at a time: R13 of the contract."""

from __future__ import annotations

from cutlass import Float32, cute

from sparse_mla_kernel.ptx.math import ex2_approx_ftz, sub_rn


@cute.jit
def partial_weight(partial_max: Float32, top: Float32) -> Float32:
    """The weight of a partial that has a key, relative to the largest running maximum ``top``.

    The weight of a partial without keys is 0. Its row sum says so: 0, and not NaN, which would
    make the total NaN. Each kernel takes that decision where its instructions are cheapest.
    """
    return ex2_approx_ftz(sub_rn(partial_max, top))  # R13
