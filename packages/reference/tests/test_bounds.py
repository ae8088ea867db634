"""The derived bound holds, is what its derivation says, and is worth something."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sparse_mla_reference import (
    BASE,
    IDEAL,
    LOW_LATENCY,
    SM90,
    SM120,
    Schedule,
    bounds,
    decode,
    e4m3,
)
from sparse_mla_reference.arguments import check
from sparse_mla_reference.bounds import EX2_ERROR
from sparse_mla_reference.decode import decode_row
from sparse_mla_reference.instructions.mufu import ex2

HEADS = 16


def uniform(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.integers(0, 0x7F, shape) | (rng.integers(0, 2, shape) << 7)).astype(np.uint8)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return e4m3.encode(rng.standard_normal(shape))


def tiny(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.integers(0, 10, shape) | (rng.integers(0, 2, shape) << 7)).astype(np.uint8)


def heavy(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return e4m3.encode(rng.standard_t(2, shape))


FAMILIES = {
    "normal": (normal, 0.06),
    "flat": (normal, 1e-3),
    "peaky": (normal, 3.0),
    "heavy": (heavy, 0.1),
    "bytes": (uniform, 1e-5),
    "bytes, peaky": (uniform, 1e-3),
    "huge logits": (uniform, 1.0),
    "subnormal": (tiny, 1.0),
}


def shares(query, kv, count, scale, out_scale=1.0, **options) -> dict[str, np.ndarray]:
    """|kernel - exact| / bound, elementwise, of the row before and after BF16 and of the LSE."""
    rows = np.arange(count, dtype=np.int32)[None]
    arguments = (query, kv, rows, np.array([count], np.int32))
    scales: dict[str, Any] = {"scale_log2": scale, "out_scale": out_scale}
    given = scales | options
    latent, lse = decode(*arguments, **given)
    exact, exact_lse = decode(*arguments, **scales, machine=IDEAL)
    limit = bounds(*arguments, **given)
    schedule, machine = options.get("schedule", BASE), options.get("machine", SM90)
    row = decode_row(check(*arguments, scale, out_scale, schedule, machine), 0, schedule, machine)
    errors = {
        "row": (row.row - exact[0], limit.row[0]),
        "latent": (latent.astype(np.float64) - exact, limit.latent),
        "lse": (lse - exact_lse, limit.lse),
    }
    return {name: np.abs(error) / bound for name, (error, bound) in errors.items()}


@pytest.mark.parametrize("machine", [SM90, SM120], ids=lambda m: m.name)
@pytest.mark.parametrize("count", [1, 2, 5, 64, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_holds(family, count, machine):
    source, scale = FAMILIES[family]
    rng = np.random.default_rng(count)
    query, kv = source(rng, 1, HEADS, 576), source(rng, count, 576)
    for name, share in shares(query, kv, count, scale, machine=machine).items():
        assert np.isfinite(share).all(), name
        assert share.max() <= 1, name


@pytest.mark.parametrize("schedule", [Schedule(split=1, chunk=32), Schedule(split=8, qk_chains=1)])
def test_the_bound_holds_for_other_schedules(schedule):
    rng = np.random.default_rng(30)
    query, kv = normal(rng, 1, HEADS, 576), normal(rng, 300, 576)
    for share in shares(query, kv, 300, 0.06, schedule=schedule).values():
        assert share.max() <= 1


def test_it_is_reached_where_p_is_hard_to_round():
    """One value column of one sign and P halfway between E4M3 numbers: every error points the same
    way, and the bound is within a twentieth of the error."""
    query = np.zeros((1, HEADS, 576), np.uint8)
    query[..., 512] = 0x38
    kv = np.full((8, 576), 0x38, np.uint8)
    kv[:, 512] = e4m3.encode(np.array([0, *[-1.0] * 7], np.float32))
    scale = float(np.log2(448 / 216))  # P = 216, halfway between 208 and 224: ties go to 208 or 224
    kv[0, :512] = 0
    share = shares(query, kv, 8, scale)
    assert 0.95 < share["row"].max() <= 1


@pytest.mark.parametrize(("count", "least"), [(16, 0.9), (64, 0.6), (300, 0.3)])
def test_it_is_not_vacuous_on_random_rows(count, least):
    """The worst element of 8,192 uses this share of its bound: errors of n keys add up like sqrt(n)
    while the bound must allow for n. The bound is a few percent of the largest output."""
    rng = np.random.default_rng(31)
    query, kv = normal(rng, 1, HEADS, 576), normal(rng, count, 576)
    assert shares(query, kv, count, 0.06)["row"].max() > least
    rows, valid = np.arange(count, dtype=np.int32)[None], np.array([count], np.int32)
    limit = bounds(query, kv, rows, valid, scale_log2=0.06, out_scale=1.0)
    exact, _ = decode(query, kv, rows, valid, scale_log2=0.06, out_scale=1.0, machine=IDEAL)
    assert limit.row.max() < 0.08 * np.abs(exact).max()
    assert limit.lse.max() < 3e-4


def test_a_coarser_p_breaks_it(monkeypatch):
    """P rounded toward zero instead of to nearest is outside the bound: the check can fail."""
    rng = np.random.default_rng(32)
    query, kv = normal(rng, 1, HEADS, 576), np.abs(normal(rng, 64, 576) & np.uint8(0x7F))
    truncate = lambda self, p: e4m3.encode(p, rounding="rz")  # noqa: E731
    monkeypatch.setattr(type(SM90), "quantise", truncate)
    assert shares(query, kv, 64, 0.06)["row"].max() > 1.2


def test_empty_rows_have_no_error_and_nan_has_no_bound():
    rng = np.random.default_rng(33)
    query, kv = normal(rng, 3, 2, 576), normal(rng, 4, 576)
    kv[3, 7] = 0x7F
    rows = np.array([[0, 1], [-1, 9], [2, 3]], np.int32)
    limit = bounds(query, kv, rows, np.array([0, 2, 2], np.int32), scale_log2=0.06, out_scale=1.0)
    for part in limit:
        assert (part[:2] == 0).all()
        assert np.isnan(part[2]).all()


def test_overflow_has_no_bound():
    rng = np.random.default_rng(34)
    query, kv = uniform(rng, 1, 2, 576), uniform(rng, 8, 576)
    rows, valid = np.arange(8, dtype=np.int32)[None], np.array([8], np.int32)
    limit = bounds(query, kv, rows, valid, scale_log2=1e35, out_scale=1.0)
    assert np.isinf(limit.row).all()
    assert np.isinf(limit.lse).all()
    limit = bounds(query, kv, rows, valid, scale_log2=1e-6, out_scale=3e38)
    assert np.isinf(limit.latent).any()


def test_ex2_error_constant():
    """The bound on MUFU.EX2 holds over a dense sample of the arguments that softmax has."""
    x = np.random.default_rng(35).uniform(-120, 9, 400_000).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(ex2(x) - exact) / exact
    assert EX2_ERROR / 3 < error.max() <= EX2_ERROR


def test_ideal_is_refused():
    with pytest.raises(TypeError, match="machine must be a Gpu machine, got IDEAL"):
        bounds(
            np.zeros((1, 1, 576), np.uint8),
            np.zeros((1, 576), np.uint8),
            np.zeros((1, 1), np.int32),
            np.zeros(1, np.int32),
            scale_log2=1.0,
            out_scale=1.0,
            machine=IDEAL,
        )


U, SLACK = 2.0**-24, 1 + 2.0**-10
LOG2_448 = math.log2(448)
P_VALUES = e4m3.decode(np.arange(0x7F, dtype=np.uint8)).astype(float)


@dataclass(frozen=True)
class Instruction:
    """What step 1 takes from the tensor core, written out: of a sum of k columns every term is cut
    by 2^-25 and the result by 2^-23, relatively.

    Attributes:
        step: columns of one instruction.
        term: error relative to the absolute sum of one instruction's products.
        run: error relative to the absolute sum so far.
        least: least magnitude that a nonzero operand counts with.
    """

    step: int
    term: float
    run: float
    least: float = 0.0


# Two chained sums of 16 columns, the second with the first one's result, then an addition in FP32.
EMULATED = Instruction(32, (16 + 17) * 2.0**-25 + 2 * 2.0**-23, U)
# One sum of all columns and the accumulator; a subnormal operand keeps the exponent -6.
NATIVE = Instruction(32, 0.0, 33 * 2.0**-25 + 2.0**-23, 2.0**-6)
# One sum of 16 columns and the accumulator.
FP16 = Instruction(16, 0.0, 17 * 2.0**-25 + 2.0**-23)


def sizes(code: np.ndarray, least: float) -> np.ndarray:
    """Magnitudes in units of 2^-9, of which every E4M3 value is a multiple."""
    units = np.abs(np.ldexp(e4m3.decode(code).astype(float), 9)).astype(np.int64)
    return np.where(units > 0, np.maximum(units, int(np.ldexp(least, 9))), 0)


def moved(p: float, error: float) -> float:
    """Step 5 for one p > 0: by how much of p its quantisation moves it."""
    high = p * (1 + error)
    binade = max(math.frexp(min(high, 448.0))[1] - 1, -6)
    half_ulp = max(2.0 ** (binade - 4), high - 448)
    return min(half_ulp, float(np.abs(P_VALUES - p).min()) + p * error, high) / p


def derived(
    query: np.ndarray,
    keys: np.ndarray,
    used: np.ndarray,
    scale: float,
    out_scale: float,
    schedule: Schedule,
    instruction: Instruction,
) -> tuple[list[float], list[float], float]:
    """The bounds of one head by the derivation, key after key: row, BF16 row and LSE.

    The keys are in the schedule's order. Logits come from integers, so that they are exact.
    """
    chains = schedule.qk_chains
    steps = -(-576 // (instruction.step * chains))
    qk = (instruction.term + steps * instruction.run + (chains - 1) * U) * SLACK
    sign = np.where(keys & 0x80, -1, 1) * np.where(query & 0x80, -1, 1)
    dots = (sizes(keys, 0) * sizes(query, 0) * sign).sum(axis=1)
    absolute = (sizes(keys, instruction.least) * sizes(query, instruction.least)).sum(axis=1)
    s = [float(x) * 2.0**-18 * scale for x in dots]
    before = [float(x) * 2.0**-18 * abs(scale) * qk for x in absolute]
    s_error = [e + U * (abs(x) + e) + 2.0**-149 for x, e in zip(s, before, strict=True)]
    live = [j for j in range(len(s)) if used[j]]
    top, top_error = max(s[j] for j in live), max(s_error[j] for j in live)

    ex2_error = 2.0**-23 * (math.log(2) + 1.5) * SLACK
    exponent: dict[int, float] = {}
    ex2s: dict[int, int] = {}
    r: dict[int, float] = {}
    for part in schedule.parts(len(s)):
        m = -math.inf
        before_it: list[int] = []
        for start in range(part.start, part.stop, schedule.chunk):
            chunk = [j for j in live if start <= j < min(start + schedule.chunk, part.stop)]
            raised = max([m, *(s[j] for j in chunk)])
            for j in before_it:
                exponent[j] += U * (raised - m + 2 * top_error)
                ex2s[j] += 1
            m = raised
            for j in chunk:
                bias = U * (abs(m) + top_error + LOG2_448)
                argument = m - s[j] + LOG2_448 + s_error[j] + top_error
                exponent[j] = s_error[j] + bias + U * (argument + bias)
                ex2s[j] = 1
                p = 2.0 ** max(s[j] - m + LOG2_448, -2000)
                error = 2.0 ** (exponent[j] + top_error + 2.0**-23) * (1 + ex2_error) - 1
                r[j] = moved(p, error) if p else 0.0
            before_it += chunk
        for j in before_it:
            exponent[j] += U * (top - m + 2 * top_error)
            ex2s[j] += 1
    e = {j: 2.0 ** exponent[j] * (1 + ex2_error) ** ex2s[j] - 1 for j in live}

    relative = {j: 2.0 ** max(s[j] - top, -2000) for j in live}
    total = sum(relative.values())
    w = {j: relative[j] / total for j in live}
    chunks = max(-(-(part.stop - part.start) // schedule.chunk) for part in schedule.parts(len(s)))
    warps = schedule.chunk // schedule.warp_keys
    adds = int(math.log2(schedule.warp_keys)) + warps - 1 + chunks + schedule.split
    d = (1 + sum(w[j] * e[j] for j in live)) * (1 + adds * U * SLACK) - 1 + len(s) * 2.0**-125

    steps = chunks * -(-schedule.chunk // instruction.step)
    pv = (instruction.term + steps * instruction.run + (chunks + schedule.split) * U) * SLACK
    rows, latents = [], []
    for column in range(512):
        v = e4m3.decode(keys[:, column]).astype(float)
        size = sizes(keys[:, column], instruction.least) * 2.0**-9
        spread = sum(w[j] * (1 + e[j]) * (1 + r[j]) * size[j] for j in live)
        moved_by = sum(w[j] * (e[j] + r[j] * (1 + e[j])) * abs(v[j]) for j in live)
        numerator = moved_by + pv * spread + len(s) * 2.0**-125 * max(abs(v))
        exact = sum(w[j] * v[j] for j in live)
        bound = abs(out_scale) * (numerator + abs(exact) * d) / (1 - d)
        bound += (abs(exact * out_scale) + bound) * 2 * U * SLACK + 2.0**-149
        bound += 2.0**-149 * 448 * total * spread
        rows.append(bound)
        binade = math.frexp(abs(exact * out_scale) + bound)[1] - 1
        latents.append(bound + 2.0 ** (max(binade, -126) - 8))

    log_total = math.log2(448 * total)
    lse2 = abs(top + log_total - LOG2_448)
    shift = -math.log2(1 - d)
    error = shift + U * (abs(top) + top_error + LOG2_448) + 2 * U * (log_total + shift)
    error += U * (lse2 + error)
    constant = abs(float(np.float32(math.log(2))) / math.log(2) - 1) + U
    return rows, latents, (error + (lse2 + error) * constant) * math.log(2) * SLACK


@pytest.mark.parametrize(
    ("source", "scale", "out_scale", "schedule", "machine", "instruction"),
    [
        (normal, 0.06, 1.0, BASE, SM90, EMULATED),
        (
            normal,
            -0.5,
            -3.0,
            Schedule(split=2, qk_chains=3, chunk=48, warp_keys=16),
            SM90,
            EMULATED,
        ),
        (tiny, 2.0, 2.0**-128, Schedule(split=2), SM120, NATIVE),
        (tiny, 2.0**-4, 2.0**-145, Schedule(split=1), SM90, EMULATED),
        (heavy, 0.2, 1.0, LOW_LATENCY, SM90, FP16),
    ],
    ids=["base", "signs", "subnormal, native", "subnormal output", "low latency"],
)
def test_it_is_what_the_derivation_says(source, scale, out_scale, schedule, machine, instruction):
    """Every term and every constant. Of the last column only a key far below the others has a
    value, so that what is flushed below 2^-126 decides."""
    rng = np.random.default_rng(36)
    query, kv = source(rng, 1, 1, 576), source(rng, 600, 576)
    count = 140 if schedule.split < 8 else 530
    rows = rng.permutation(600)[:count].astype(np.int32)[None]
    rows[0, 40:60] = -1
    rows[0, ::9] = -1
    kv[rows[0, 1]] = np.where(np.sign(scale) * (query[0, 0] & 0x80) > 0, 0x7E, 0xFE)
    kv[:, 511] = 0
    kv[rows[0, 1], 511] = 0x38
    limit = bounds(
        query,
        kv,
        rows,
        np.array([count], np.int32),
        scale_log2=scale,
        out_scale=out_scale,
        schedule=schedule,
        machine=machine,
    )
    ids = rows[0, schedule.order(count)]
    keys = np.where((ids >= 0)[:, None], kv[ids], np.uint8(0))
    scales = float(np.float32(scale)), float(np.float32(out_scale))
    row, latent, lse = derived(query[0, 0], keys, ids >= 0, *scales, schedule, instruction)
    np.testing.assert_allclose(limit.row[0, 0], row, rtol=1e-8, atol=0)
    np.testing.assert_allclose(limit.latent[0, 0], latent, rtol=1e-8, atol=0)
    np.testing.assert_allclose(limit.lse[0, 0], lse, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("out_scale", "row_is_bounded", "latent_is_bounded"),
    [
        (float.fromhex("0x1.fdp127"), True, True),
        (float.fromhex("0x1.fep127"), True, False),  # the largest BF16
        (float.fromhex("0x1.fffp127"), True, False),
        (float.fromhex("0x1.fffffep127"), False, False),  # the largest float32
        (-float.fromhex("0x1.fdp127"), True, True),
        (-float.fromhex("0x1.fep127"), True, False),
        (-float.fromhex("0x1.fffffep127"), False, False),
    ],
)
def test_an_output_that_may_overflow_has_no_bound(out_scale, row_is_bounded, latent_is_bounded):
    """One key of ones, so that the row is the scale."""
    one = np.full((1, 576), 0x38, np.uint8)
    rows, valid = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    limit = bounds(one[None], one, rows, valid, scale_log2=2.0**-9, out_scale=out_scale)
    assert np.isfinite(limit.row).all() == row_is_bounded
    assert np.isfinite(limit.latent).all() == latent_is_bounded
    for part, bounded in ((limit.row, row_is_bounded), (limit.latent, latent_is_bounded)):
        assert (np.isinf(part) != bounded).all()


def test_zeros_may_be_off_by_the_least_numbers():
    """Values of zero: one unit of float32's subnormals, and half a unit of BF16's after that."""
    zero = np.zeros((1, 576), np.uint8)
    rows, valid = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    limit = bounds(zero[None], zero, rows, valid, scale_log2=1.0, out_scale=1.0)
    assert (limit.row == 2.0**-149).all()
    assert (limit.latent == 2.0**-149 + 2.0**-134).all()


def test_errors_as_large_as_the_sum_have_no_bound():
    """Logits from small to so large that their error alone doubles the sum: from there on neither
    the row nor the LSE has a bound, and before it both have one that grows."""
    one = np.full((1, 576), 0x38, np.uint8)
    rows, valid = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    limits = [
        bounds(one[None], one, rows, valid, scale_log2=float(scale), out_scale=1.0)
        for scale in np.exp2(np.arange(0, 16, 0.25))
    ]
    row = np.array([limit.row.max() for limit in limits])
    lse = np.array([limit.lse.max() for limit in limits])
    bounded = np.isfinite(row)
    assert 10 < bounded.sum() < 60
    assert np.array_equal(np.isfinite(lse), bounded)
    assert (np.diff(row[bounded]) > 0).all()
    assert (row[~bounded] == np.inf).all()
    assert (lse[~bounded] == np.inf).all()
