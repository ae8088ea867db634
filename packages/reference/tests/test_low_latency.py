"""The low-latency schedule: dealt keys, blocked chains, FP16 products."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from sparse_mla_reference import IDEAL, SM90, decode
from sparse_mla_reference.bounds import bounds
from sparse_mla_reference.instructions.mma_models import SM90_E4M3_AS_F16
from sparse_mla_reference.instructions.tensor_core import mma
from sparse_mla_reference.machine import Gpu
from sparse_mla_reference.partial import pv
from sparse_mla_reference.schedule import BASE, LOW_LATENCY, Schedule
from sparse_mla_reference.softmax import ordered_sum


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 32, 33, 63, 256, 300])
def test_keys_are_dealt_in_runs_of_eight(count):
    order, parts = LOW_LATENCY.order(count), LOW_LATENCY.parts(count)
    assert sorted(order.tolist()) == list(range(count))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    for cta, part in enumerate(parts):
        mine = order[part]
        assert (mine // 8 % LOW_LATENCY.split == cta).all()
        assert (np.diff(mine) > 0).all()
    sizes = [part.stop - part.start for part in parts]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 8


def case(seed=5, batch=2, heads=16, width=330):
    rng = np.random.default_rng(seed)
    code = rng.integers(0, 0x7F, (batch * heads + 400, 576), dtype=np.uint8)
    code |= rng.integers(0, 2, code.shape, dtype=np.uint8) << 7
    query, kv = code[: batch * heads].reshape(batch, heads, 576), code[batch * heads :]
    rows = rng.integers(-3, 420, (batch, width)).astype(np.int32)
    valid = np.array([width, 37], np.int32)[:batch]
    return query, kv, rows, valid


def test_products_are_summed_by_the_fp16_instruction_in_four_runs_of_columns():
    """One key: the logit by hand, through the LSE, which for one key is the logit alone."""
    query, kv, rows, _ = case(heads=16, width=1)
    rows[:] = 3
    one = np.array([1, 1], np.int32)
    scale = float(np.float32(2.0**-10))
    _, lse = decode(query, kv, rows, one, scale_log2=scale, out_scale=1.0, schedule=LOW_LATENCY)
    zero = np.zeros((16, 1), np.float32)
    quarters = [slice(144 * i, 144 * i + 144) for i in range(4)]
    parts = [mma(query[0][:, c], kv[3:4, c].T, zero, model=SM90_E4M3_AS_F16) for c in quarters]
    dot = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    logit = dot[:, 0] * np.float32(scale)
    log2_448 = np.float32(np.log2(448.0))
    # One key: p = EX2(s - (s - log2 448)), and the row sum is p.
    lse2 = (logit - log2_448) + SM90.log2(SM90.ex2(logit - (logit - log2_448)))
    assert np.array_equal(lse[0], lse2 * np.float32(np.log(2.0)))


def test_a_chunk_is_summed_as_one_tree():
    """All 64 keys: neighbours are added, then neighbouring pairs, up to the halves."""
    p = np.exp2(np.random.default_rng(6).uniform(-20, 8.8, (200, 64))).astype(np.float32)

    def tree(x):
        half = x.shape[1] // 2
        return x[:, 0] if half == 0 else tree(x[:, :half]) + tree(x[:, half:])

    found = ordered_sum(p, LOW_LATENCY, SM90)
    assert np.array_equal(found, tree(p))
    assert (found != ordered_sum(p, BASE, SM90)).any()


def test_it_is_inside_its_bound_and_differs_from_the_base_schedule():
    arguments = case()
    scales: dict[str, Any] = {"scale_log2": 3e-6, "out_scale": 0.5}
    latent, lse = decode(*arguments, **scales, schedule=LOW_LATENCY)
    exact, exact_lse = decode(*arguments, **scales, schedule=LOW_LATENCY, machine=IDEAL)
    limit = bounds(*arguments, **scales, schedule=LOW_LATENCY)
    assert (np.abs(latent.astype(np.float64) - exact) <= limit.latent).all()
    assert (np.abs(lse - exact_lse) <= limit.lse).all()
    base, _ = decode(*arguments, **scales)
    assert not np.array_equal(base.view(np.uint16), latent.view(np.uint16))
    ideal, _ = decode(*arguments, **scales, schedule=BASE, machine=IDEAL)
    np.testing.assert_allclose(exact, ideal, rtol=1e-9, atol=1e-12)


def test_values_are_padded_to_one_step_of_the_fp16_instruction():
    """16 keys need no zero row, and 17 need 15. More zero rows change no bit, so count them."""
    widths = []

    class Counting(Gpu):
        def mma(self, a, b, acc):
            widths.append((a.shape[1], b.shape[0]))
            return super().mma(a, b, acc)

    machine = Counting(**{f.name: getattr(SM90, f.name) for f in fields(SM90)})
    acc = np.zeros((2, 512), np.float32)
    for count in (1, 16, 17, 33):
        p, values = np.zeros((2, count), np.uint8), np.zeros((count, 512), np.uint8)
        pv(p, values, acc, LOW_LATENCY, machine.multiplying(LOW_LATENCY.mma))
    assert widths == [(16, 16), (16, 16), (32, 32), (48, 48)]


@pytest.mark.parametrize(
    ("field", "value"), [("deal", -1), ("deal", 1.5), ("qk_order", "random"), ("mma", "bf16")]
)
def test_fields_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        Schedule(**{field: value})
