"""The derived bound holds, and is worth something."""

from typing import Any

import numpy as np
import pytest

from sparse_mla_reference import BASE, IDEAL, SM90, SM120, Schedule, bounds, decode, e4m3
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
