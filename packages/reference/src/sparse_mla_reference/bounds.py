"""How far the kernel may be from the exact answer, per element, derived and not fitted.

Notation: u = 2^-24. A key j has the exact base-2 logit s_j and softmax weight w_j = 2^(s_j - LSE2);
v_j is its latent row; hats are the kernel's values. The running max m only scales: as exact numbers
2^(s_j - m_t) 2^(m_t - m_t+1) ... 2^(m_c - max) doesn't depend on the m's. So the error of an m
changes nothing by itself; only the roundings of the differences that it enters count.

1. **QK** (R1, R2). The sums of one instruction err by at most k_term sum|q k| over its columns,
   adding it to the accumulator by k_run of the absolute sum so far (``_mma_error``).
2. **Logit** (R3): E_s = |scale| E_qk + u |s|.
3. **Weight** (R5 to R7, R13). p_j times its later alphas and its CTA's merge weight is
   448 w_j / max w (1 + e_j). The exponents err by E_s and by u times the size of each difference
   formed (bias, s - bias, the alphas' and the weight's), every EX2 by ``EX2_ERROR`` relatively:
   |e_j| <= E_j = 2^(sum of the exponents' errors) (1 + EX2_ERROR)^count - 1.
4. **Sum** (R8, R9, R13): terms are positive, so n roundings in sequence give a relative g = n u,
   and the total is D (1 + d), |d| <= E_D = (1 + sum w_j E_j)(1 + g) - 1.
5. **Quantised P** (R11). A rounding to nearest moves p by its distance to the nearest E4M3 value,
   which changes no faster than p itself: |Q(p^) - p^| <= min(half an ulp, dist(p) + |p^ - p|, p^).
   The relative part of it, r_j, multiplies w_j |v_j|.
6. **PV** (R10, R12, R13) as step 1, over W = sum w_j (1 + E_j)(1 + r_j) |v_j|.
7. **Quotient**. With N the exact numerator, dN its error and o = N / D:
   |N^ / D^ - o| = |dN - o dD| / D^ <= (dN + |o| E_D) / (1 - E_D), in units of D. The row is that
   times ``out_scale``, with two more roundings (R15).
8. **BF16**: half an ulp of the largest magnitude that step 7 allows.
9. **LSE** (R14): -log2(1 - E_D), the two additions, log2f within one ulp (CUDA C++ Programming
   Guide, mathematical functions), the multiply by ln 2 and that constant's own rounding.

EX2 results below 2^-126 are flushed: that adds at most 2^-126 a key to N / D and to D. A float32
that may overflow has no bound (infinity).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import arguments
from sparse_mla_reference.formats import e4m3
from sparse_mla_reference.gather import gather
from sparse_mla_reference.instructions.mma_models import Model
from sparse_mla_reference.machine import SM90, Gpu, Machine
from sparse_mla_reference.schedule import BASE, LATENT, Schedule
from sparse_mla_reference.softmax import P_SCALE_LOG2

Float64s = NDArray[np.float64]

U = 2.0**-24
# Covers products of two relative errors where the text above adds them: all such are below 2^-12.
SLACK = 1 + 2.0**-10
# MUFU.EX2: its argument is cut to a multiple of 2^-23 (a factor 2^(2^-23) at most) and its table is
# within one unit of 2^-23 of the rounded value, which is 1/2 unit off (relative to a g >= 1).
EX2_ERROR = 2.0**-23 * (np.log(2.0) + 1.5) * SLACK
LN_2_ERROR = abs(float(np.float32(np.log(2.0))) / np.log(2.0) - 1)
BF16_MAX = float.fromhex("0x1.fep127")
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Bounds(NamedTuple):
    """Bounds on |kernel - exact|, float64, never negative; NaN where the exact answer is NaN.

    Attributes:
        row: [B, H, 512] of the latent row before its rounding to BF16.
        latent: [B, H, 512] of the BF16 row.
        lse: [B, H] of the natural LSE; 0 for a row without keys, whose -inf is exact.
    """

    row: Float64s
    latent: Float64s
    lse: Float64s


@np.errstate(all="ignore")
def bounds(
    query: NDArray[Any],
    kv: NDArray[Any],
    rows: NDArray[Any],
    valid: NDArray[Any],
    *,
    scale_log2: float,
    out_scale: float,
    schedule: Schedule = BASE,
    machine: Machine = SM90,
) -> Bounds:
    """Bound the distance of ``decode`` on ``machine`` from ``decode`` on ``IDEAL``.

    Takes the arguments of ``decode``. The derivation is this module's docstring.

    Raises:
        TypeError: as ``decode``; or ``machine`` is not a GPU (``IDEAL`` rounds nothing).
        ValueError: as ``decode``.
    """
    args = arguments.check(query, kv, rows, valid, scale_log2, out_scale, schedule, machine)
    if not isinstance(machine, Gpu):
        raise TypeError(f"machine must be a Gpu machine, got {machine.name}")
    machine = machine.multiplying(schedule.mma)
    batch, heads = args.query.shape[:2]
    wide = (batch, heads, LATENT)
    result = Bounds(np.zeros(wide), np.zeros(wide), np.zeros((batch, heads)))
    for b in range(batch):
        ids = args.row_ids(b)
        keys, used = gather(args.kv, ids[schedule.order(len(ids))])
        if not used.any():
            continue
        weights = _weights(args.query[b], keys, used, float(args.scale_log2), schedule, machine)
        row, exact = _row_bound(weights, keys, float(args.out_scale), schedule, machine)
        result.row[b] = row
        result.latent[b] = row + _half_bf16_ulp(np.abs(exact) + row)
        result.lse[b] = _lse_bound(weights)
    return result


class _Weights(NamedTuple):
    """Steps 1 to 5 for one row: [H, n] per key, [H] per head."""

    weight: Float64s  # w_j
    error: Float64s  # E_j
    quantisation: Float64s  # r_j
    total: Float64s  # D, with 448 for the key of the largest logit
    total_error: Float64s  # E_D
    top: Float64s  # the row max m
    top_error: Float64s


def _weights(
    query: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    used: NDArray[np.bool_],
    scale: float,
    schedule: Schedule,
    machine: Gpu,
) -> _Weights:
    s, s_error = _logits(query, keys, scale, schedule, machine)
    s = np.where(used, s, -np.inf)
    s_error = np.where(used, s_error, 0.0)
    top = np.max(s, axis=1)
    top_error = np.max(s_error, axis=1)
    grid, grid_error, exponent, ex2s = _exponents(s, s_error, top, schedule)
    error = np.exp2(exponent) * (1 + EX2_ERROR) ** ex2s - 1
    p_error = np.exp2(grid_error) * (1 + EX2_ERROR) - 1
    quantisation = np.where(used, _quantisation(np.exp2(grid), p_error), 0.0)
    relative = np.exp2(s - top[:, None])
    total = relative.sum(axis=1)
    weight = relative / total[:, None]
    roundings = _sum_roundings(len(used), schedule)
    total_error = (1 + np.sum(weight * error, axis=1)) * (1 + roundings * U * SLACK) - 1
    total_error += len(used) * 2.0**-125
    return _Weights(weight, error, quantisation, 448 * total, total_error, top, top_error)


def _logits(
    query: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    scale: float,
    schedule: Schedule,
    machine: Gpu,
) -> tuple[Float64s, Float64s]:
    """Steps 1 and 2: exact logits [H, n] and their errors E_s."""
    q, k = (e4m3.decode(x).astype(np.float64) for x in (query, keys))
    absolute = _magnitude(q, machine.model) @ _magnitude(k, machine.model).T
    term, run = _mma_error(machine.model)
    steps = -(-q.shape[1] // (machine.step * schedule.qk_chains))
    relative = (term + steps * run + (schedule.qk_chains - 1) * U) * SLACK
    s = (q @ k.T) * scale
    before = abs(scale) * relative * absolute
    error = before + U * (np.abs(s) + before) + 2.0**-149
    return s, np.where(np.abs(s) + error > FLOAT32_MAX, np.inf, error)


def _exponents(
    s: Float64s, s_error: Float64s, top: Float64s, schedule: Schedule
) -> tuple[Float64s, Float64s, Float64s, Float64s]:
    """Step 3, per key [H, n]: exponent of p and its error, error of the weight's exponent, and
    how many EX2 results are in the weight."""
    shape = s.shape
    grid, grid_error, exponent, ex2s = (np.zeros(shape) for _ in range(4))
    largest_error = np.max(s_error, axis=1)  # also of any max, which moves no more than its terms
    for part in schedule.parts(shape[1]):
        running = np.full(shape[0], -np.inf)
        for chunk in schedule.chunks(part.stop - part.start):
            span = slice(part.start + chunk.start, part.start + chunk.stop)
            raised = np.maximum(running, np.max(s[:, span], axis=1))
            # alpha multiplies all the keys before; its argument is one rounded difference.
            earlier = slice(part.start, span.start)
            exponent[:, earlier] += _difference(running, raised, largest_error)[:, None]
            ex2s[:, earlier] += 1
            running = raised
            m, m_error = running[:, None], largest_error[:, None]
            bias_rounding = U * (np.abs(m) + m_error + P_SCALE_LOG2)
            distance = np.abs(s[:, span] - m) + P_SCALE_LOG2 + s_error[:, span] + m_error
            rounding = bias_rounding + U * (distance + bias_rounding)
            grid[:, span] = s[:, span] - m + P_SCALE_LOG2
            grid_error[:, span] = s_error[:, span] + m_error + rounding + 2.0**-23
            exponent[:, span] = s_error[:, span] + rounding
            ex2s[:, span] = 1
        exponent[:, part] += _difference(running, top, largest_error)[:, None]
        ex2s[:, part] += 1
    grid, grid_error, exponent, ex2s = (
        np.where(np.isneginf(s), 0.0, x) for x in (grid, grid_error, exponent, ex2s)
    )
    return grid, grid_error, exponent, ex2s


def _difference(a: Float64s, b: Float64s, error: Float64s) -> Float64s:
    """Rounding of the float32 difference of two maxima; 0 where a is -inf, before the first key."""
    return np.where(np.isneginf(a), 0.0, U * (np.abs(a - b) + 2 * error))


def _quantisation(p: Float64s, p_error: Float64s) -> Float64s:
    """Step 5: bound of |Q(p^) - p^| / p."""
    high = p * (1 + p_error)
    binade = np.maximum(np.frexp(np.minimum(high, 448.0))[1] - 1, -6)
    half_ulp = np.maximum(np.ldexp(0.5, binade - 3), high - 448)
    distance = np.abs(e4m3.decode(e4m3.encode(p)) - p) + p * p_error
    bound = np.minimum(np.minimum(half_ulp, distance), high)
    return np.where(p > 0, bound / np.where(p > 0, p, 1), 0.0)


def _sum_roundings(count: int, schedule: Schedule) -> int:
    """Step 4: roundings in sequence that a numerator goes through on its way into the total."""
    tree = schedule.warp_keys.bit_length() - 1 + schedule.chunk // schedule.warp_keys - 1
    return tree + _chunks(count, schedule) + schedule.split


def _chunks(count: int, schedule: Schedule) -> int:
    """Chunks of the fullest CTA."""
    return max(len(list(schedule.chunks(part.stop - part.start))) for part in schedule.parts(count))


def _row_bound(
    weights: _Weights, keys: NDArray[np.uint8], out_scale: float, schedule: Schedule, machine: Gpu
) -> tuple[Float64s, Float64s]:
    """Steps 6 and 7: the bound before BF16 and the exact row, [H, 512] each."""
    w, error, r = weights.weight, weights.error, weights.quantisation
    v = e4m3.decode(keys[:, :LATENT]).astype(np.float64)  # masked keys are zero
    exact = w @ v
    size = np.abs(v)
    absolute = (w * (1 + error) * (1 + r)) @ _magnitude(v, machine.model)
    term, run = _mma_error(machine.model)
    chunks = _chunks(len(keys), schedule)
    steps = chunks * -(-schedule.chunk // machine.step)
    accumulation = (term + steps * run + (chunks + schedule.split) * U) * SLACK
    numerator = (w * (error + r * (1 + error))) @ size + accumulation * absolute
    numerator += len(keys) * 2.0**-125 * size.max(axis=0)
    d = weights.total_error[:, None]
    quotient = np.where(d < 1, (numerator + np.abs(exact) * d) / (1 - d), np.inf)
    row = exact * out_scale
    bound = abs(out_scale) * quotient
    bound += (np.abs(row) + bound) * (2 * U * SLACK) + 2.0**-149
    # The reciprocal may be subnormal; its error is then absolute.
    bound += 2.0**-149 * weights.total[:, None] * absolute
    bound = np.where(np.abs(row) + bound > FLOAT32_MAX, np.inf, bound)
    return _unbounded(bound, row), row


def _unbounded(bound: Float64s, exact: Float64s) -> Float64s:
    """Infinity where overflow left no number though there is an exact answer."""
    return np.where(np.isnan(bound) & np.isfinite(exact), np.inf, bound)


def _half_bf16_ulp(magnitude: Float64s) -> Float64s:
    """Step 8."""
    binade = np.maximum(np.frexp(magnitude)[1] - 1, -126)
    half = np.ldexp(1.0, binade - 8)
    return np.where(magnitude < BF16_MAX, half, np.where(np.isnan(magnitude), np.nan, np.inf))


def _lse_bound(weights: _Weights) -> Float64s:
    """Step 9: [H]."""
    d = weights.total_error
    log_total = np.log2(weights.total)
    lse2 = np.abs(weights.top + (log_total - P_SCALE_LOG2))
    scaled_top = U * (np.abs(weights.top) + weights.top_error + P_SCALE_LOG2)
    shift = np.where(d < 1, -np.log2(1 - np.minimum(d, 0.999999)), np.inf)
    log2f = 2 * U * (log_total + shift)
    before = shift + scaled_top + log2f
    before += U * (lse2 + before)
    natural = (before + (lse2 + before) * (LN_2_ERROR + U)) * np.log(2.0)
    return _unbounded(np.asarray(natural * SLACK + 2.0**-149), lse2)


def _mma_error(model: Model) -> tuple[float, float]:
    """Step 1 for one instruction: error relative to its own absolute sum of products (k_term) and
    relative to the absolute sum so far (k_run).

    A sum cuts each of its terms by less than 2^(e_max - fraction_bits), and 2^e_max is at most its
    largest term's magnitude; its result is cut by 2^-output_bits of itself.
    """
    term = 0.0
    for i, columns in enumerate(model.sums):
        terms = len(columns) + (i > 0 or model.accumulator_inside)
        term += terms * 2.0**-model.fraction_bits + 2.0**-model.output_bits
    return (0.0, term) if model.accumulator_inside else (term, U)


def _magnitude(x: Float64s, model: Model) -> Float64s:
    """|x|, not below 2^(its exponent in the model): a subnormal may keep the least one."""
    size = np.abs(x)
    if model.normalises_subnormals:
        return size
    return np.where(size > 0, np.maximum(size, 2.0**model.operands.min_exponent), size)
