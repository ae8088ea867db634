"""The kernel's arithmetic in numpy, rounding by rounding.

Where a line says SASS, that is the instruction that decided it; ``docs/modelling.md`` shows how to
find it.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import bf16, e4m3, mufu, tensor_core
from sparse_mla_reference.instructions.float32 import add, mul
from sparse_mla_reference.instructions.fma import fma
from sparse_mla_reference.instructions.libdevice import log2f

LATENT, BLOCK = 512, 64
P_SCALE_LOG2 = np.float32(8)
LN_2 = np.float32(0.6931471805599453)

# SASS: F2FP.F16.E4M3.UNPACK_B of both operands, then HMMA.16816.F32 twice for 32 columns, on the
# columns k with k mod 4 in {0, 1} and then {2, 3}, the accumulator chained through both. The same
# columns and precision as the emulated m16n8k32, but C is a term, not added afterwards.
MMA = replace(
    tensor_core.SM90_E4M3,
    name="Triton's dot of E4M3 on sm_90, 16 rows",
    instruction="tl.dot",
    sass="F2FP.F16.E4M3.UNPACK_B, 2 x HMMA.16816.F32",
    accumulator_inside=True,
)

Float32s = NDArray[np.float32]


class Block(NamedTuple):
    """The state after a block, with what led there.

    Attributes:
        logits: [H, 64] unscaled; -inf for an absent key.
        p: [H, 64] numerators, 256 at the running max.
        alpha: [H] factor on what came before.
        sum: [H] of this block's p.
        total: [H] running sum.
        top: [H] running max of the base-2 logits.
        acc: [H, 512] sum of p x value.
    """

    logits: Float32s
    p: Float32s
    alpha: Float32s
    sum: Float32s
    total: Float32s
    top: Float32s
    acc: Float32s


def decode_attention(
    query: NDArray[np.uint8],
    kv: NDArray[np.uint8],
    rows: NDArray[np.int32],
    valid: NDArray[np.int32],
    scale_log2: np.float32,
    out_scale: np.float32,
) -> tuple[NDArray[Any], Float32s]:
    """What the kernel writes: latent [B, H, 512] bfloat16, lse [B, H] float32.

    Args:
        query: [B, H, 576] E4M3 bytes.
        kv: [N, 576] E4M3 bytes.
        rows: [B, width] cache rows.
        valid: [B] how many of them count.
        scale_log2: positive.
        out_scale: the factor on the output.
    """
    pairs = []
    for q, row, n in zip(query, rows, valid, strict=True):
        states = blocks(q, kv[row[:n]], scale_log2)
        pairs.append(finish(states[-1] if states else empty(len(q)), out_scale))
    latent, lse = zip(*pairs, strict=True)
    return np.stack(latent), np.stack(lse)


def empty(heads: int) -> Block:
    """The state before the first key."""
    nothing, zero = np.zeros((heads, 0), np.float32), np.zeros(heads, np.float32)
    top, acc = np.full(heads, -np.inf, np.float32), np.zeros((heads, LATENT), np.float32)
    return Block(nothing, nothing, zero, zero, zero, top, acc)


def blocks(
    query: NDArray[np.uint8], keys: NDArray[np.uint8], scale_log2: np.float32
) -> list[Block]:
    """One row: query [H, 576], keys [n, 576], both E4M3 bytes; a state a block of 64 keys."""
    states: list[Block] = []
    for start in range(0, len(keys), BLOCK):
        part = keys[start : start + BLOCK]
        before = states[-1] if states else empty(len(query))
        states.append(add_block(before, query, part, scale_log2))
    return states


@np.errstate(all="ignore")
def add_block(
    before: Block, query: NDArray[np.uint8], part: NDArray[np.uint8], scale_log2: np.float32
) -> Block:
    """One turn of the loop; ``part`` has up to 64 keys."""
    keys = np.pad(part, [(0, BLOCK - len(part)), (0, 0)])  # absent keys load as 0
    used = np.arange(BLOCK) < len(part)
    heads = len(query)

    # The first dot takes 512 columns, the second 64 on top of it: one chain of 18 steps.
    s = tensor_core.mma(query, keys.T, np.zeros((heads, BLOCK), np.float32), model=MMA)
    s = np.where(used, s, np.float32(-np.inf))

    # SASS: FMUL of the max by the scale, FMNMX (which ignores NaN, as fmax does).
    top = np.fmax(before.top, mul(np.fmax.reduce(s, axis=1), scale_log2))
    # SASS: FADD, MUFU.EX2 with no scaling around it: the .ftz form.
    alpha = mufu.ex2(add(before.top, -top))
    # SASS: FADD top - 8, then *one* FFMA for s * scale - bias: the compiler contracted it.
    bias = add(top, -P_SCALE_LOG2)
    p = mufu.ex2(fma(s, scale_log2, -bias[:, None]))
    block_sum = warp_tree_sum(p)
    total = fma(before.total, alpha, block_sum)  # SASS: FFMA

    # SASS: FMUL on the accumulators, F2FP.SATFINITE.E4M3 of p, the same HMMA pairs over the keys.
    rescaled = mul(before.acc, alpha[:, None])
    acc = tensor_core.mma(e4m3.encode(p), keys[:, :LATENT], rescaled, model=MMA)
    return Block(s, p, alpha, block_sum, total, top, acc)


def warp_tree_sum(p: Float32s) -> Float32s:
    """``tl.sum`` over 64 keys: [H, 64] to [H].

    Warp w holds keys 8w .. 8w + 7, its lane j of four keys 2j and 2j + 1. SASS: FADD of the pair;
    SHFL.BFLY 2 and FADD, SHFL.BFLY 1 and FADD; through shared memory to one warp, whose lane is
    now the warp number: SHFL.BFLY 4, 2, 1, each with its FADD.
    """
    lanes = add(p[:, 0::2], p[:, 1::2]).reshape(-1, 8, 4)  # [H, warp, lane]
    warps = _butterfly(lanes, 4)  # [H, warp]
    return _butterfly(warps, 8)


def _butterfly(x: Float32s, width: int) -> Float32s:
    """Sum over the last axis by exchanges with lane xor width / 2, ..., 2, 1."""
    while width > 1:
        width //= 2
        x = add(x[..., :width], x[..., width:])
    return x[..., 0]


def finish(state: Block, out_scale: np.float32) -> tuple[NDArray[Any], Float32s]:
    """Normalise: latent [H, 512] bfloat16 and lse [H]."""
    # SASS: FMUL by 0.25 or 2^24 at the ends of the range, MUFU.RCP, FMUL: div.full, not div.rn.
    quotient = mufu.div_full(np.asarray(out_scale), state.total, ftz=False)
    inverse = np.where(state.total == 0, np.float32(0), quotient)
    latent = bf16.encode(mul(state.acc, inverse[:, None]))
    # SASS: libdevice's log2f with FFMA.FTZ. The total is 0, NaN or at least 256 (less the rounding
    # of exp2), where no step of it meets a subnormal: log2f as it is.
    lse2 = add(add(state.top, -P_SCALE_LOG2), log2f(state.total))
    return latent, mul(lse2, LN_2)
