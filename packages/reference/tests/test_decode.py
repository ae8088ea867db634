"""The whole decode: against a scalar restatement of the contract, and at every edge."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import IDEAL, SM90, SM120, Schedule, decode, e4m3, mufu
from sparse_mla_reference.instructions.libdevice import log2f

SCALES: dict[str, Any] = {"scale_log2": 0.0625, "out_scale": 0.75}
INT32 = np.iinfo(np.int32)
NAN_BF16, NAN_F32, LOWEST = 0x7FFF, 0x7FFFFFFF, 0xFF800000


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return e4m3.encode(rng.standard_normal(shape))


def lists(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row lists as ``rows`` and ``valid``; the padding holds ids that must not be read."""
    width = max(1, *map(len, rows))
    out = np.full((len(rows), width), INT32.max, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)


def same(a: tuple, b: tuple) -> bool:
    return all(
        np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True)
    )


def latent_bits(latent: np.ndarray) -> np.ndarray:
    return latent.view(np.uint16)


def lse_bits(lse: np.ndarray) -> np.ndarray:
    return lse.view(np.uint32)


def ex2(x: np.float32) -> np.float32:
    return np.float32(mufu.ex2(np.asarray(x)))


class Scalar:
    """The contract for one head and a few columns, in scalars: no array of the package is used but
    for EX2, log2f and E4M3, which have tests of their own."""

    def __init__(self, exact_e4m3_mma, exact_fma, scale_log2, out_scale):
        self.mma, self.fma = exact_e4m3_mma, exact_fma
        self.scale, self.out_scale = np.float32(scale_log2), np.float32(out_scale)

    def logit(self, q, k) -> np.float32:
        chains = []
        for chain in range(2):
            columns = [i for i in range(576) if i // 32 % 2 == chain]
            chains.append(self.mma([q[i] for i in columns], [k[i] for i in columns], 0.0))
        return np.float32(np.float32(chains[0] + chains[1]) * self.scale)

    def chunk_sum(self, p) -> np.float32:
        p = [*p, *[np.float32(0)] * (64 - len(p))]
        warps = [p[i : i + 8] for i in range(0, 64, 8)]
        total = np.float32(0)
        for a, b, c, d, e, f, g, h in warps:
            total = total + (((a + b) + (c + d)) + ((e + f) + (g + h)))
        return total

    def cta(self, q, keys, used, columns):
        m, total, acc = np.float32(-np.inf), np.float32(0), [np.float32(0)] * len(columns)
        for start in range(0, len(keys), 64):
            chunk, live = keys[start : start + 64], used[start : start + 64]
            s = [self.logit(q, k) for k in chunk]
            raised = max([m, *[x for x, u in zip(s, live, strict=True) if u]])
            alpha = np.float32(1) if m == -np.inf else ex2(np.float32(m - raised))
            m, bias = raised, np.float32(raised - np.float32(np.log2(448)))
            p = [
                ex2(np.float32(x - bias)) if u else np.float32(0)
                for x, u in zip(s, live, strict=True)
            ]
            total = self.fma(total, alpha, self.chunk_sum(p))
            quantised = [float(e4m3.decode(e4m3.encode(np.asarray(x)))) for x in p]
            quantised += [0.0] * (-len(p) % 32)
            for i, column in enumerate(columns):
                v = [float(k[column]) for k in chunk] + [0.0] * (-len(p) % 32)
                acc[i] = self.mma(quantised, v, np.float32(acc[i] * alpha))
        return m, total, acc

    def row(self, q, keys, used, columns):
        per = -(-len(keys) // 4)
        parts = [slice(per * i, per * i + per) for i in range(4)]
        ctas = [self.cta(q, keys[p], used[p], columns) for p in parts]
        top = max(m for m, _, _ in ctas)
        total, row = np.float32(0), [np.float32(0)] * len(columns)
        for m, partial_sum, acc in ctas:
            weight = np.float32(0) if partial_sum == 0 else ex2(np.float32(m - top))
            total = self.fma(weight, partial_sum, total)
            row = [self.fma(weight, a, r) for a, r in zip(acc, row, strict=True)]
        inverse = self.out_scale / total
        lse2 = np.float32(top - np.float32(np.log2(448))) + log2f(np.asarray(total))[()]
        return [np.float32(r * inverse) for r in row], np.float32(lse2 * np.float32(np.log(2)))


def test_against_the_contract_in_scalars(exact_e4m3_mma, exact_fma):
    """70 keys to a CTA: two chunks, the second of 6, some keys masked, the max rising late."""
    rng = np.random.default_rng(10)
    query, kv = normal(rng, 1, 2, 576), normal(rng, 300, 576)
    kv[250:260] = query[0, 0]
    ids = rng.integers(0, 250, 280)
    ids[[3, 64, 69, 139, 200]] = [-1, 300, INT32.max, INT32.min, -7]
    ids[[68, 137, 270]] = [250, 255, 259]
    rows, valid = lists(ids.tolist())
    latent, lse = decode(query, kv, rows, valid, **SCALES)
    used = (ids >= 0) & (ids < 300)
    keys = [
        e4m3.decode(kv[i]).tolist() if u else [0.0] * 576 for i, u in zip(ids, used, strict=True)
    ]
    scalar = Scalar(exact_e4m3_mma, exact_fma, **SCALES)
    columns = [0, 1, 31, 32, 255, 511]
    for head in range(2):
        q = e4m3.decode(query[0, head]).tolist()
        row, expected_lse = scalar.row(q, keys, used, columns)
        expected = np.array(row, np.float32).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            latent_bits(latent[0, head, columns]), expected.view(np.uint16)
        )
        assert lse_bits(lse)[0, head] == expected_lse.view(np.uint32)


@pytest.mark.parametrize("machine", [SM90, SM120, IDEAL], ids=lambda m: m.name)
def test_shapes_and_dtypes(machine):
    rng = np.random.default_rng(11)
    rows, valid = lists([1, 2, 3], [4])
    latent, lse = decode(normal(rng, 2, 3, 576), normal(rng, 9, 576), rows, valid, **SCALES,
                         machine=machine)  # fmt: skip
    ideal = machine is IDEAL
    assert (latent.shape, lse.shape) == ((2, 3, 512), (2, 3))
    assert latent.dtype == (np.float64 if ideal else ml_dtypes.bfloat16)
    assert lse.dtype == (np.float64 if ideal else np.float32)


def test_ideal_is_plain_attention():
    rng = np.random.default_rng(12)
    query, kv = normal(rng, 2, 4, 576), normal(rng, 400, 576)
    rows, valid = lists(rng.permutation(400)[:300].tolist(), [5, 6])
    latent, lse = decode(query, kv, rows, valid, **SCALES, machine=IDEAL)
    for b in range(2):
        keys = e4m3.decode(kv[rows[b, : valid[b]]]).astype(np.float64)
        s = e4m3.decode(query[b]).astype(np.float64) @ keys.T * 0.0625 * np.log(2)
        weights = np.exp(s - s.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(latent[b], weights / total @ keys[:, :512] * 0.75, rtol=1e-10,
                                   atol=1e-14)  # fmt: skip
        np.testing.assert_allclose(lse[b], (s.max(axis=1) + np.log(total[:, 0])), rtol=1e-12)


def test_float8_inputs_are_their_bytes():
    rng = np.random.default_rng(13)
    query, kv = normal(rng, 1, 2, 576), normal(rng, 5, 576)
    rows, valid = lists([0, 3])
    fp8 = ml_dtypes.float8_e4m3fn
    typed = decode(query.view(fp8), kv.view(fp8), rows, valid, **SCALES)
    assert same(typed, decode(query, kv, rows, valid, **SCALES))


@pytest.mark.parametrize("machine", [SM90, IDEAL], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "case", [[], [-1], [INT32.min, INT32.max, 5, -1], [-1] * 300], ids=["n=0", "-1", "edge", "all"]
)
def test_rows_without_keys_are_zero_and_lowest(case, machine):
    rng = np.random.default_rng(14)
    rows, valid = lists(case, [0])
    latent, lse = decode(normal(rng, 2, 2, 576), normal(rng, 5, 576), rows, valid, **SCALES,
                         machine=machine)  # fmt: skip
    assert (latent[0].view(np.uint8) == 0).all()  # +0
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_an_empty_cache_and_an_empty_batch():
    rng = np.random.default_rng(15)
    rows, valid = lists([0, 1])
    latent, lse = decode(normal(rng, 1, 2, 576), normal(rng, 0, 576), rows, valid, **SCALES)
    assert (latent_bits(latent) == 0).all()
    assert (lse_bits(lse) == LOWEST).all()
    nothing, _ = decode(normal(rng, 0, 2, 576), normal(rng, 3, 576), rows, valid, **SCALES)
    assert nothing.shape == (0, 2, 512)


@pytest.mark.parametrize("bad", [-1, INT32.min, INT32.max, 300])
@pytest.mark.parametrize(
    "where", [slice(0, 1), slice(130, 131), slice(279, 280), slice(0, 64), slice(64, 70),
              slice(70, 140)], ids=["front", "middle", "end", "chunk", "last chunk", "cta"]
)  # fmt: skip
def test_masked_ids_are_never_read(bad, where):
    """The value of a masked id makes no difference, and neither does anything in the cache that no
    valid id names; the row equals one computed with the masked keys' weights at zero."""
    rng = np.random.default_rng(16)
    query, kv = normal(rng, 1, 2, 576), normal(rng, 300, 576)
    ids = rng.permutation(300)[:280]
    ids[where] = bad
    rows, valid = lists(ids.tolist())
    got = decode(query, kv, rows, valid, **SCALES)
    poisoned = np.full_like(kv, 0x7F)
    named = ids[(ids >= 0) & (ids < 300)]
    poisoned[named] = kv[named]
    assert same(got, decode(query, poisoned, rows, valid, **SCALES))
    exact, _ = decode(query, poisoned, *lists(named.tolist()), **SCALES, machine=IDEAL)
    assert np.abs(got[0].astype(np.float64) - exact).max() < 0.1 * np.abs(exact).max()


def test_masked_keys_keep_their_place_in_the_split():
    """The split is by list position: a masked key in front moves the keys behind it."""
    rng = np.random.default_rng(17)
    query, kv = normal(rng, 1, 8, 576), normal(rng, 64, 576)
    plain = decode(query, kv, *lists([*range(20)]), **SCALES)
    padded = decode(query, kv, *lists([-1, *range(20)]), **SCALES)
    assert not same(plain, padded)


@pytest.mark.parametrize("valid", [-1, INT32.min, 0])
def test_valid_at_or_below_zero_is_no_keys(valid):
    rng = np.random.default_rng(18)
    rows = np.arange(8, dtype=np.int32)[None]
    latent, lse = decode(normal(rng, 1, 2, 576), normal(rng, 9, 576), rows,
                         np.array([valid], np.int32), **SCALES)  # fmt: skip
    assert (latent_bits(latent) == 0).all()
    assert (lse_bits(lse) == LOWEST).all()


def test_valid_over_width_is_width():
    rng = np.random.default_rng(19)
    query, kv = normal(rng, 1, 2, 576), normal(rng, 9, 576)
    rows = np.arange(8, dtype=np.int32)[None]
    results = [
        decode(query, kv, rows, np.array([v], np.int32), **SCALES) for v in (8, 9, INT32.max)
    ]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_more_rows_than_the_batch_are_ignored():
    rng = np.random.default_rng(20)
    query, kv = normal(rng, 2, 2, 576), normal(rng, 9, 576)
    rows, valid = lists([1, 2], [3], [4, 5], [6])
    assert same(
        decode(query, kv, rows, valid, **SCALES), decode(query, kv, rows[:2], valid[:2], **SCALES)
    )


@pytest.mark.parametrize("machine", [SM90, IDEAL], ids=lambda m: m.name)
def test_nan_in_a_query_reaches_its_head_alone(machine):
    rng = np.random.default_rng(21)
    query, kv = normal(rng, 2, 4, 576), normal(rng, 90, 576)
    clean = decode(query, kv, *lists([*range(90)], [3]), **SCALES, machine=machine)
    query[0, 2, 575] = 0xFF
    latent, lse = decode(query, kv, *lists([*range(90)], [3]), **SCALES, machine=machine)
    hit = np.zeros((2, 4), bool)
    hit[0, 2] = True
    assert np.isnan(latent.astype(np.float64)[hit]).all()
    assert np.isnan(lse[hit]).all()
    assert same((latent[~hit], lse[~hit]), (clean[0][~hit], clean[1][~hit]))
    if machine is SM90:
        assert (latent_bits(latent)[hit] == NAN_BF16).all()
        assert (lse_bits(lse)[hit] == NAN_F32).all()


@pytest.mark.parametrize("column", [0, 511, 512, 575])
@pytest.mark.parametrize("position", [0, 63, 64, 89])
def test_nan_in_a_used_key_reaches_every_head_of_its_rows(column, position):
    rng = np.random.default_rng(22)
    query, kv = normal(rng, 2, 3, 576), normal(rng, 100, 576)
    kv[position, column] = 0x7F
    latent, lse = decode(query, kv, *lists([*range(90)], [90, 91]), **SCALES)
    assert (latent_bits(latent)[0] == NAN_BF16).all()
    assert (lse_bits(lse)[0] == NAN_F32).all()
    assert np.isfinite(latent[1].astype(np.float32)).all()


def test_a_row_of_nan_keys_alone_is_nan_not_empty():
    rng = np.random.default_rng(23)
    kv = np.full((4, 576), 0xFF, np.uint8)
    latent, lse = decode(normal(rng, 1, 2, 576), kv, *lists([0, 1, 2, 3]), **SCALES)
    assert (latent_bits(latent) == NAN_BF16).all()
    assert (lse_bits(lse) == NAN_F32).all()


@pytest.mark.parametrize("level", [0.0, 1.0, -66854.859, 3000.0])
@pytest.mark.parametrize("count", [1, 64, 65, 257])
def test_equal_logits_average(level, count):
    """All keys equal: the row is the value itself, the LSE is level ln 2 + ln count."""
    kv = np.full((3, 576), e4m3.encode(np.array(1.5, np.float32)), np.uint8)
    query = np.full((1, 2, 576), 0x38, np.uint8)
    scale = np.float32(level / (576 * 1.5))
    rows, valid = lists([1] * count)
    latent, lse = decode(query, kv, rows, valid, scale_log2=float(scale), out_scale=1.0)
    assert (latent.astype(np.float32) == 1.5).all()
    exact = float(scale) * 576 * 1.5 * np.log(2) + np.log(count)
    np.testing.assert_allclose(lse, exact, rtol=2**-22, atol=2**-21)


def test_one_dominant_logit():
    """One key at 0, 2047 at -7 in base-2 units: 2047 weights of 2^-7 outweigh the one."""
    query = np.zeros((1, 2, 576), np.uint8)
    query[..., 0] = 0x38
    kv = np.full((2, 576), 0x38, np.uint8)
    kv[:, 0] = e4m3.encode(np.array([0, -7], np.float32))
    kv[0, 1], kv[1, 1] = 0x40, 0x38  # values 2 and 1
    rows, valid = lists([0, *[1] * 2047])
    latent, lse = decode(query, kv, rows, valid, scale_log2=1.0, out_scale=1.0)
    total = 1 + 2047 * 2.0**-7
    np.testing.assert_allclose(latent[0, :, 1].astype(float), (2 + 2047 / 128) / total, rtol=2**-8)
    np.testing.assert_allclose(lse, np.log(total), rtol=2**-21)


def test_max_rising_in_the_last_chunk():
    rng = np.random.default_rng(24)
    query, kv = normal(rng, 1, 4, 576), normal(rng, 300, 576)
    kv[299] = query[0, 0]
    rows, valid = lists([*range(300)])  # CTA 3: keys 225 to 299, its last chunk 289 to 299
    latent, lse = decode(query, kv, rows, valid, scale_log2=1.0, out_scale=1.0)
    exact, exact_lse = decode(query, kv, rows, valid, scale_log2=1.0, out_scale=1.0, machine=IDEAL)
    np.testing.assert_allclose(latent[0, 0].astype(float), exact[0, 0], atol=0.02, rtol=2**-7)
    np.testing.assert_allclose(lse, exact_lse, rtol=2**-20)


def test_heads_and_rows_are_independent():
    rng = np.random.default_rng(25)
    query, kv = normal(rng, 3, 5, 576), normal(rng, 300, 576)
    rows, valid = lists([*range(200)], [1, 2], [*range(100, 300)])
    latent, lse = decode(query, kv, rows, valid, **SCALES)
    one = decode(query[2:, 3:4], kv, rows[2:], valid[2:], **SCALES)
    assert same(one, (latent[2:, 3:4], lse[2:, 3:4]))


@pytest.mark.parametrize(
    "schedule", [Schedule(split=1), Schedule(split=8), Schedule(chunk=32), Schedule(qk_chains=1),
                 Schedule(qk_chains=3), Schedule(chunk=128)]
)  # fmt: skip
def test_schedules_move_bits_and_little_else(schedule):
    """Uniform bytes, as the QK sums of narrow data are exact in any order."""
    rng = np.random.default_rng(26)
    query, kv = (rng.integers(0, 0x7F, s).astype(np.uint8) for s in ((1, 16, 576), (300, 576)))
    rows, valid = lists([*range(300)])
    base = decode(query, kv, rows, valid, scale_log2=1e-5, out_scale=1.0)
    other = decode(query, kv, rows, valid, scale_log2=1e-5, out_scale=1.0, schedule=schedule)
    assert not same(base, other)
    np.testing.assert_allclose(base[1], other[1], rtol=1e-6)


def test_strides_don_t_matter():
    rng = np.random.default_rng(28)
    query, kv = normal(rng, 4, 6, 1152)[::2, ::3, ::2], normal(rng, 60, 1152)[::-2, 1::2]
    rows = rng.integers(0, 30, (8, 20)).astype(np.int32)[::4, ::2]
    valid = np.array([10, 0, 7, 0], np.int32)[::2]
    assert not any(x.flags.c_contiguous for x in (query, kv, rows, valid))
    compact = [np.ascontiguousarray(x) for x in (query, kv, rows, valid)]
    assert same(decode(query, kv, rows, valid, **SCALES), decode(*compact, **SCALES))


def test_inputs_are_not_changed():
    rng = np.random.default_rng(27)
    rows, valid = lists([0, -1, 2])
    arguments = [normal(rng, 1, 2, 576), normal(rng, 3, 576), rows, valid]
    for array in arguments:
        array.flags.writeable = False
    decode(*arguments, **SCALES)
    decode(*arguments, **SCALES, machine=IDEAL)


def arguments(**changes):
    base = {
        "query": np.zeros((1, 2, 576), np.uint8),
        "kv": np.zeros((4, 576), np.uint8),
        "rows": np.zeros((1, 3), np.int32),
        "valid": np.zeros(1, np.int32),
        **SCALES,
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": np.zeros((1, 2, 576), np.float32)}, TypeError, "query must be uint8 or float8"),
        ({"query": np.zeros((1, 2, 512), np.uint8)}, ValueError, r"query must be \[B, H, 576\]"),
        ({"query": np.zeros((2, 576), np.uint8)}, ValueError, r"query must be .*got \[2, 576\]"),
        ({"kv": np.zeros((4, 576), np.int8)}, TypeError, "kv must be uint8 or float8_e4m3fn, got"),
        (
            {"kv": np.zeros((4, 656), np.uint8)},
            ValueError,
            r"kv must be \[N, 576\], got \[4, 656\]",
        ),
        ({"rows": np.zeros((1, 3), np.int64)}, TypeError, "rows must be int32, got int64"),
        ({"rows": np.zeros(3, np.int32)}, ValueError, r"rows must be \[>= 1, width\], got \[3\]"),
        ({"rows": np.zeros((0, 3), np.int32)}, ValueError, "rows must have at least 1 rows"),
        ({"valid": np.zeros(0, np.int32)}, ValueError, "valid must have at least 1 rows"),
        ({"valid": np.zeros(1, np.uint32)}, TypeError, "valid must be int32, got uint32"),
        ({"scale_log2": "1"}, TypeError, "scale_log2 must be a real number, got str"),
        ({"out_scale": np.zeros(2)}, TypeError, "out_scale must be a real number, got ndarray"),
        ({"machine": "SM90"}, TypeError, "machine must be a Machine of .*, got str"),
        ({"schedule": 4}, TypeError, "schedule must be a Schedule of .*, got int"),
        ({"schedule": Schedule(pv_keys=16)}, ValueError, "pv_keys must be a multiple of 32, .*16"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        decode(**arguments(**changes))


def test_another_package_s_schedule_is_told_apart():
    other = type("Schedule", (), {"__module__": "some_kernel.schedule"})()
    with pytest.raises(TypeError, match=r"of sparse_mla_reference, .*some_kernel\.schedule\.Sched"):
        decode(**arguments(schedule=other))


def test_the_step_binds_only_what_has_one():
    for plan in (
        {"schedule": Schedule(pv_keys=16, mma="f16")},
        {"schedule": Schedule(pv_keys=16), "machine": IDEAL},
    ):
        latent, _ = decode(**arguments(valid=np.ones(1, np.int32), **plan))
        assert latent.shape == (1, 2, 512)


@pytest.mark.parametrize("machine", [SM90, IDEAL])
@pytest.mark.parametrize("shape", [(1, 0, 576), (0, 2, 576)])
def test_no_heads_or_no_rows(shape, machine):
    latent, lse = decode(
        **arguments(query=np.zeros(shape, np.uint8), valid=np.full(1, 3, np.int32)), machine=machine
    )
    assert latent.shape == (*shape[:2], 512)
    assert lse.shape == shape[:2]
