"""FlashMLA's sparse FP8 decode (sm_90, 64 heads) in numpy, as its SASS reads.

Two kernels: ``flash_fwd_splitkv_mla_fp8_sparse_kernel`` makes one partial a split, and
``flash_fwd_mla_combine_kernel`` merges a row that has several. ``docs/modelling.md`` lists the
instructions behind each line.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import bf16, e4m3, mufu, tensor_core
from sparse_mla_reference.instructions.float32 import add, div, mul
from sparse_mla_reference.instructions.fma import fma
from sparse_mla_reference.instructions.libdevice import log2f
from sparse_mla_reference.instructions.tensor_core import Model

LATENT, COLUMNS, BLOCK = 512, 576, 64
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
LOWEST = np.float32(-1e30)  # the running max before the first key

Float32s = NDArray[np.float32]

# HGMMA.64x64x16.F32.BF16 (QK) and HGMMA.64x256x16.F32.BF16 (PV).
MMA = replace(
    tensor_core.SM90_BF16,
    name="SM90_WGMMA_BF16",
    instruction="wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16",
    sass="HGMMA.64xNx16.F32.BF16",
)


@dataclass(frozen=True)
class Arithmetic:
    """The decisions that the SASS settles, so that others can be tried.

    Attributes:
        mma: the matrix instruction.
        fused_logit: s * scale - max in one FMA, not a multiply and a subtraction.
        lane_sums: each lane keeps its own row sum over all blocks; lanes are added at the end.
            Otherwise every block's sum is added over the lanes first.
        sum_rounded_p: the row sum is of P after the rounding to BF16.
        logf: the LSE is ln(sum) + max / log2(e), not (log2(sum) + max) * ln(2).
        reciprocal: the row is multiplied by MUFU.RCP of the sum, not by 1 / sum rounded correctly.
    """

    mma: Model = MMA
    fused_logit: bool = True
    lane_sums: bool = True
    sum_rounded_p: bool = False
    logf: bool = True
    reciprocal: bool = True


SASS = Arithmetic()

# One decision changed each; what the SASS says is not among them.
VARIANTS = {
    "MMA aligns to 24 bits": replace(SASS, mma=replace(MMA, fraction_bits=24)),
    "MMA aligns to 26 bits": replace(SASS, mma=replace(MMA, fraction_bits=26)),
    "MMA as sm_80's: 8 products at a time, 24 bits": replace(SASS, mma=tensor_core.SM80_BF16),
    "MMA at FP8's 13 bits": replace(SASS, mma=replace(MMA, fraction_bits=13, output_bits=13)),
    "logit by multiply, then subtract": replace(SASS, fused_logit=False),
    "row sum over the lanes in every block": replace(SASS, lane_sums=False),
    "row sum of the rounded P": replace(SASS, sum_rounded_p=True),
    "LSE by log2, times ln 2": replace(SASS, logf=False),
    "1 / sum correctly rounded": replace(SASS, reciprocal=False),
}


class Tokens(NamedTuple):
    """A row's keys, as the cache holds them.

    Attributes:
        latent: [n, 512] E4M3 bytes.
        scale: [n, 4] float32, for 128 columns each.
        rope: [n, 64] bfloat16.
        used: [n] bool, False where the list has -1.
    """

    latent: NDArray[np.uint8]
    scale: Float32s
    rope: NDArray[Any]
    used: NDArray[np.bool_]

    def part(self, start: int, stop: int) -> "Tokens":
        """Some of them."""
        keys = slice(start, stop)
        return Tokens(self.latent[keys], self.scale[keys], self.rope[keys], self.used[keys])


class State(NamedTuple):
    """A split's online softmax.

    Attributes:
        top: [H] running max of the base-2 logits.
        sums: [H, 4] row sums, one a lane.
        acc: [H, 512].
    """

    top: Float32s
    sums: Float32s
    acc: Float32s


def decode_row(
    query: NDArray[Any],
    tokens: Tokens,
    splits: list[tuple[int, int]],
    softmax_scale: float,
    how: Arithmetic = SASS,
) -> tuple[NDArray[Any], Float32s]:
    """One row: latent [H, 512] bfloat16 and natural-log lse [H].

    Args:
        query: [H, 576] bfloat16.
        tokens: n of them, n a multiple of 64.
        splits: [start, stop) in blocks of 64 keys; more than one are combined.
        softmax_scale: the factor on the logits.
        how: the arithmetic.
    """
    scale_log2 = mul(np.float32(softmax_scale), LOG2_E)
    states = [
        split(query, tokens.part(start * BLOCK, stop * BLOCK), scale_log2, how)
        for start, stop in splits
    ]
    if len(states) == 1:
        return finish(states[0], how)
    return combine([partial(state, how) for state in states])


def split(query: NDArray[Any], tokens: Tokens, scale_log2: Float32s, how: Arithmetic) -> State:
    """The blocks of one split, in order."""
    heads = len(query)
    state = State(
        np.full(heads, LOWEST),
        np.zeros((heads, 4), np.float32),
        np.zeros((heads, LATENT), np.float32),
    )
    for start in range(0, len(tokens.used), BLOCK):
        state = add_block(state, query, tokens.part(start, start + BLOCK), scale_log2, how)
    return state


@np.errstate(all="ignore")
def add_block(
    state: State, query: NDArray[Any], tokens: Tokens, scale_log2: Float32s, how: Arithmetic
) -> State:
    """One block of 64 keys."""
    keys = dequantise(tokens)  # [64, 576]
    s = tensor_core.mma(query, keys.T, np.zeros((len(query), BLOCK), np.float32), model=how.mma)
    s = np.where(tokens.used, s, np.float32(-np.inf))
    top = np.fmax(state.top, mul(np.fmax.reduce(s, axis=1), scale_log2))
    # Without .ftz, unlike most kernels: FSETP.GEU -126, FMUL 0.5, MUFU.EX2, FMUL with itself.
    alpha = mufu.ex2(add(state.top, -top), ftz=False)
    if how.fused_logit:
        exponent = fma(s, scale_log2, -top[:, None])
    else:
        exponent = add(mul(s, scale_log2), -top[:, None])
    p = mufu.ex2(exponent, ftz=False)
    p_bf16 = bf16.encode(p)
    sums = lane_sums(bf16.decode(p_bf16) if how.sum_rounded_p else p)
    if not how.lane_sums:
        sums = np.stack([over_lanes(sums), *[np.zeros(len(s), np.float32)] * 3], axis=1)
    acc = mul(state.acc, alpha[:, None])
    return State(
        top,
        fma(alpha[:, None], state.sums, sums),
        tensor_core.mma(p_bf16, keys[:, :LATENT], acc, model=how.mma),
    )


def dequantise(tokens: Tokens) -> NDArray[Any]:
    """Keys [n, 576] bfloat16: E4M3 x BF16(scale), rounded to BF16; zeros where not used."""
    scale = bf16.decode(bf16.encode(tokens.scale)).repeat(128, axis=1)
    latent = bf16.encode(mul(e4m3.decode(tokens.latent), scale))  # the product is exact in FP32
    keys = np.concatenate([latent, tokens.rope], axis=1)
    return np.where(tokens.used[:, None], keys, np.zeros((), keys.dtype))


def lane_sums(p: Float32s) -> Float32s:
    """Sums of a block's p [H, 64] by lane, [H, 4].

    An accumulator of wgmma gives lane t of four the keys 8j + 2t and 8j + 2t + 1, j from 0 to 7.
    FADD: from 0, one after the other.
    """
    by_lane = p.reshape(-1, 8, 4, 2)  # [H, j, lane, pair]
    total = np.zeros((len(p), 4), np.float32)
    for j in range(8):
        for k in range(2):
            total = add(total, by_lane[:, j, :, k])
    return total


def over_lanes(sums: Float32s) -> Float32s:
    """[H, 4] to [H]: SHFL.BFLY 1, FADD, SHFL.BFLY 2, FADD."""
    pairs = add(sums[:, 0::2], sums[:, 1::2])
    return add(pairs[:, 0], pairs[:, 1])


@np.errstate(all="ignore")
def normalised(state: State, how: Arithmetic) -> tuple[Float32s, Float32s]:
    """The row sum [H] and acc / sum [H, 512]; 0 where the sum is 0."""
    total = over_lanes(state.sums)
    one = np.float32(1)
    inverse = mufu.rcp(total, ftz=False) if how.reciprocal else div(one, total)
    inverse = np.where(total == 0, np.float32(0), inverse)
    return total, mul(state.acc, inverse[:, None])


def finish(state: State, how: Arithmetic) -> tuple[NDArray[Any], Float32s]:
    """A row of one split: latent, and the natural LSE, +inf for a row without keys."""
    total, row = normalised(state, how)
    if how.logf:
        lse = add(logf(total), div(state.top, LOG2_E))
    else:
        lse = mul(add(log2f(total), state.top), LN_2)
    return bf16.encode(row), np.where(total == 0, np.float32(np.inf), lse)


def partial(state: State, how: Arithmetic) -> tuple[Float32s, Float32s]:
    """A split of several: its normalised row in FP32, and its base-2 LSE, -inf without keys."""
    total, row = normalised(state, how)
    lse2 = np.where(total == 0, np.float32(-np.inf), add(log2f(total), state.top))
    return row, lse2


@np.errstate(all="ignore")
def combine(partials: list[tuple[Float32s, Float32s]]) -> tuple[NDArray[Any], Float32s]:
    """Merge up to 32 splits of a row; one lane a split, so absent ones count as -inf."""
    rows, lses = zip(*partials, strict=True)
    lse2 = np.stack(lses)  # [S, H]
    top = np.fmax.reduce(lse2, axis=0)
    top = np.where(top == -np.inf, np.float32(0), top)
    weights = mufu.ex2(add(lse2, -top), ftz=False)
    lanes = np.pad(weights, [(0, 32 - len(weights)), (0, 0)])  # [32, H]
    while len(lanes) > 1:  # SHFL.BFLY 16, 8, 4, 2, 1
        half = len(lanes) // 2
        lanes = add(lanes[:half], lanes[half:])
    merged = np.where(lanes[0] == 0, np.float32(np.inf), add(top, log2f(lanes[0])))
    acc = np.zeros_like(rows[0])
    for row, lse in zip(rows, lse2, strict=True):
        acc = fma(mufu.ex2(add(lse, -merged), ftz=False)[:, None], row, acc)
    return bf16.encode(acc), div(merged, LOG2_E)


@np.errstate(all="ignore")
def logf(x: Float32s) -> Float32s:
    """CUDA's ``logf`` without ftz or fast math, as inlined: x = 2^k (1 + m), m in [-1/3, 1/3).

    The coefficients are the immediates of its FFMAs.
    """
    subnormal = x < np.float32(2.0**-126)
    scaled = np.where(subnormal, mul(x, np.float32(2.0**23)), x)
    bits = np.ascontiguousarray(scaled).view(np.int32)
    k = (bits - np.int32(0x3F2AAAAB)) & np.int32(-0x800000)
    m = add((bits - k).view(np.float32), np.float32(-1))
    p = np.full_like(m, -np.uint32(0x3E055027).view(np.float32))
    for coefficient in _LOGF:
        p = fma(p, m, coefficient)
    q = fma(m, mul(m, p), m)
    bias = np.where(subnormal, np.float32(-23), np.float32(0))
    exponent = fma(k.astype(np.float32), np.float32(2.0**-23), bias)
    result = fma(exponent, LN_2, q)
    special = np.ascontiguousarray(scaled).view(np.uint32) >= 0x7F800000
    result = np.where(special, fma(scaled, np.float32(np.inf), np.float32(np.inf)), result)
    return np.where(x == 0, np.float32(-np.inf), result)


_LOGF = np.array(
    [
        0.14084610342979431152, -0.12148627638816833496, 0.13980610668659210205,
        -0.16684235632419586182, 0.20012299716472625732, -0.24999669194221496582,
        0.33333182334899902344, -0.5,
    ],
    np.float32,
)  # fmt: skip


def splits_of(metadata: NDArray[np.int32], blocks: int, row: int) -> list[tuple[int, int]]:
    """A row's splits, from the scheduler's table.

    Args:
        metadata: [parts, 8] int32; a part is (first row, last row, first block of the first row,
            end block of the last row, ...).
        blocks: of every row.
        row: which one.
    """
    found = []
    for first, last, begin, end in metadata[:, :4].tolist():
        if first <= row <= last:
            span = (begin if row == first else 0, end if row == last else blocks)
            if span[0] < span[1]:
                found.append(span)
    return found
