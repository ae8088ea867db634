"""Hooks and the trace: each step can be replaced alone, and a trace says which one was."""

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_mla_reference
from sparse_mla_reference import (
    CONTRACT,
    IDEAL,
    LOW_LATENCY,
    SM90,
    Schedule,
    bf16,
    decode,
    e4m3,
    first_difference,
    lse,
    trace,
)
from sparse_mla_reference.trace import CONTRACT_STEP, observed

SCALES: dict[str, Any] = {"scale_log2": 0.0625, "out_scale": 0.75}
NAMES = [field.name for field in fields(CONTRACT)]
SCHEDULES = {
    "two chunks a CTA": Schedule(split=2, chunk=16, warp_keys=8),
    "low latency": replace(LOW_LATENCY, split=2, chunk=16, warp_keys=16),
}


def case(keys=50):
    rng = np.random.default_rng(60)
    query, kv = (e4m3.encode(rng.standard_normal(s)) for s in ((2, 3, 576), (200, 576)))
    rows = rng.integers(0, 200, (2, keys)).astype(np.int32)
    rows[1, 5] = -1
    return query, kv, rows, np.full(2, keys, np.int32)


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def nudged(value):
    """A value with one number changed, in every array of it."""
    if isinstance(value, list):
        return [nudged(x) for x in value]
    if isinstance(value, tuple):
        made = [nudged(x) for x in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    changed = value.copy()
    unsigned = changed.reshape(-1).view(f"u{changed.itemsize}")
    unsigned[0] ^= 1
    return changed


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_gives_another_bit_is_named(name, schedule):
    def other(*arguments):
        return nudged(getattr(CONTRACT, name)(*arguments))

    ours = trace(*case(), **SCALES, row=1, schedule=schedule)
    theirs = trace(
        *case(), **SCALES, row=1, schedule=schedule, steps=replace(CONTRACT, **{name: other})
    )
    where = first_difference(ours, theirs)
    assert where is not None
    assert re.search(rf"\b{name}\b", where)
    assert where.startswith(CONTRACT_STEP[name])


@pytest.mark.parametrize("machine", [SM90, IDEAL], ids=lambda m: m.name)
def test_observing_changes_nothing(machine):
    seen = []
    steps = observed(CONTRACT, lambda name, value: seen.append(name))
    plain = decode(*case(), **SCALES, machine=machine)
    watched = decode(*case(), **SCALES, machine=machine, steps=steps)
    assert [bits(x) for x in plain] == [bits(x) for x in watched]
    assert set(seen) == set(NAMES) == CONTRACT_STEP.keys()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_stages_are_the_decodes(schedule):
    """Stage after stage from the values of the trace alone, down to what ``decode`` writes."""
    query, kv, rows, valid = case()
    found = trace(query, kv, rows, valid, **SCALES, row=1, schedule=schedule)
    keys, used = found.get("gather")
    assert sorted(found.order.tolist()) == list(range(50))
    ids = rows[1, found.order]
    assert np.array_equal(used, ids >= 0)
    assert np.array_equal(keys[used], kv[ids[used]])
    positions = []
    for cta in range(2):
        chunks = [e.chunk for e in found.entries if e.name == "pv" and e.cta == cta]
        assert chunks == [0, 1]
        for chunk in (0, 1):
            at = {"cta": cta, "chunk": chunk}
            mine = found.keys(cta, chunk)
            positions += mine.tolist()
            s, live = found.logits(cta, chunk), rows[1, mine] >= 0
            bias, p = found.get("bias", **at), found.get("numerators", **at)
            assert p.shape == (3, len(mine)) == s.shape
            want = SM90.ex2(SM90.sub(s, bias[:, None]))
            assert np.array_equal(p[:, live], want[:, live])
            assert not p[:, ~live].any()
            assert np.array_equal(found.get("quantise", **at), e4m3.encode(p))
            dot = (
                e4m3.decode(e4m3.encode(p)).astype(float)
                @ e4m3.decode(kv[ids]).astype(float)[
                    [found.order.tolist().index(i) for i in mine], :512
                ]
            )
            acc = found.get("rescale", **at).astype(float) + dot
            np.testing.assert_allclose(found.get("pv", **at), acc, rtol=1e-5, atol=1e-3)
        top = found.get("running_max", cta=cta, chunk=1)
        assert np.array_equal(top, np.maximum(*(found.logits(cta, k).max(axis=1) for k in (0, 1))))
    assert positions == found.order.tolist()
    latent, lses = decode(query, kv, rows, valid, **SCALES, schedule=schedule)
    assert bits(found.get("round_out")) == bits(latent[1])
    assert bits(found.get("natural")) == bits(lses[1])
    total, top = found.get("merge_partials").total, found.get("merge_partials").max
    assert bits(found.get("lse2")) == bits(lse.lse2(top, total, SM90))


def test_the_same_model_has_no_difference():
    assert first_difference(*(trace(*case(), **SCALES) for _ in range(2))) is None
    with pytest.raises(
        ValueError, match=r"^a and b must be of one list of keys, got 20 and 300 keys$"
    ):
        first_difference(trace(*case(20), **SCALES), trace(*case(300), **SCALES))


def test_where_there_is_nothing():
    query, kv, rows, _ = case()
    empty = trace(query, kv, rows, np.zeros(2, np.int32), **SCALES)
    assert [e.name for e in empty.entries if e.cta is not None] == ["start"] * 4
    assert np.isneginf(empty.get("natural")).all()
    with pytest.raises(KeyError, match=r"must be a step that ran .*got 'pv', 0, 0"):
        empty.get("pv", cta=0, chunk=0)
    ran = r"must be a step that ran \(start of CTA 0, .*of CTA 3\), got 'start', 4"
    with pytest.raises(KeyError, match=ran):
        empty.get("start", cta=4)
    for row in (-1, 2):
        with pytest.raises(
            ValueError, match=f"^row must be one of query's 2 rows, from 0, got {row}$"
        ):
            trace(*case(), **SCALES, row=row)


def test_another_type_is_a_difference_and_is_named_whole():
    ours = trace(*case(), **SCALES)
    entries = [
        replace(e, value=e.value.astype(np.float64)) if e.name in ("lse2", "pv") else e
        for e in ours.entries
    ]
    assert first_difference(ours, replace(ours, entries=tuple(entries))) == (
        "R12 (pv) of CTA 0, chunk 0"
    )
    entries = [replace(e, value=e.value[:1]) if e.name == "lse2" else e for e in ours.entries]
    assert first_difference(ours, replace(ours, entries=tuple(entries))) == "R14 (lse2)"


@pytest.mark.parametrize("other", [lambda x: x.view(np.int32), lambda x: x[None]])
def test_the_same_bytes_of_another_type_or_shape_are_a_difference(other):
    ours = trace(*case(), **SCALES)
    entries = [replace(e, value=other(e.value)) if e.name == "natural" else e for e in ours.entries]
    assert first_difference(ours, replace(ours, entries=tuple(entries))) == "R14 (natural)"


def test_the_last_chunk_of_a_cta_ends_with_the_ctas_keys():
    """Shares of 17, 17 and 16 keys in chunks of 16: the second CTA's last chunk has one key."""
    schedule = Schedule(split=3, chunk=16)
    found = trace(*case(), **SCALES, schedule=schedule)
    places = [(0, 0, 16), (0, 1, 1), (1, 0, 16), (1, 1, 1), (2, 0, 16)]
    first = 0
    for cta, chunk, count in places:
        assert found.keys(cta, chunk).tolist() == list(range(first, first + count))
        assert found.logits(cta, chunk).shape == (3, count)
        first += count


def test_steps_of_another_kind_are_refused():
    other: Any = {"quantise": e4m3.encode}
    with pytest.raises(TypeError, match=r"steps must be a Steps of .*such as CONTRACT, got dict"):
        decode(*case(), **SCALES, steps=other)


def test_a_replaced_step_is_the_models():
    """A kernel that truncates its output: the bits of the contract's row, cut."""

    def truncated(row, machine):
        return bf16.encode(row, rounding="rz")

    found = trace(*case(), **SCALES)
    latent, _ = decode(*case(), **SCALES, steps=replace(CONTRACT, round_out=truncated))
    assert bits(latent[0]) == bits(truncated(found.get("normalise"), SM90))
    assert bits(latent[0]) != bits(found.get("round_out"))


@pytest.mark.parametrize("name", [n for n in NAMES if CONTRACT_STEP[n]])
def test_a_step_is_marked_where_it_happens(name):
    source = inspect.getsource(getattr(CONTRACT, name))
    marks = set(re.findall(r"# (R\d+(?:, R\d+)*)", source))
    assert marks == {CONTRACT_STEP[name]}


def test_every_step_of_the_contract_is_marked_and_no_other():
    source = Path(sparse_mla_reference.__file__).parent
    text = "\n".join(path.read_text() for path in sorted(source.rglob("*.py")))
    marks = [mark for line in re.findall(r"# ([RO]\d+(?:, [RO]\d+)*)$", text, re.M)
             for mark in line.split(", ")]  # fmt: skip
    assert set(marks) == {f"R{k}" for k in range(1, 16)} | {f"O{k}" for k in range(1, 8)}


def rescaled_in_place(acc, alpha, machine):
    acc *= np.float32(1.0001)
    return acc


def numerators_in_place(logits, *arguments):
    p = CONTRACT.numerators(logits, *arguments)
    logits += np.float32(1)
    return p * np.float32(2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rescale": rescaled_in_place}, "R10 (rescale) of CTA 0, chunk 1"),
        ({"numerators": numerators_in_place}, "R7 (numerators) of CTA 0, chunk 0"),
    ],
)
def test_a_step_that_works_in_place_is_named_itself(changes, named):
    """An entry keeps what a step gave, not what a later step makes of the same memory."""
    schedule = SCHEDULES["two chunks a CTA"]
    ours = trace(*case(), **SCALES, schedule=schedule)
    theirs = trace(*case(), **SCALES, schedule=schedule, steps=replace(CONTRACT, **changes))
    assert first_difference(ours, theirs) == named


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": None}, TypeError, "query must be"),
        ({"rows": None}, TypeError, "rows must be"),
        ({"row": "a"}, TypeError, "row must be an integer, got 'a'"),
        ({"row": 1.5}, TypeError, r"row must be an integer, got 1\.5"),
        ({"row": 2}, ValueError, "row must be one of query's 2 rows, from 0, got 2"),
        ({"steps": None}, TypeError, "steps must be"),
    ],
)
def test_a_wrong_argument_of_a_trace_is_named(changes, error, message):
    query, kv, rows, valid = case()
    given = {"query": query, "kv": kv, "rows": rows, "valid": valid, **SCALES, **changes}
    with pytest.raises(error, match=f"^{message}"):
        trace(**given)


def test_a_place_that_a_trace_lacks_is_refused():
    found = trace(*case(), **SCALES)
    for cta in (-1, 4):
        with pytest.raises(ValueError, match=f"^cta must be from 0 to 3, got {cta}$"):
            found.keys(cta, 0)
    for chunk in (-1, 1):
        with pytest.raises(
            ValueError, match=f"^chunk must be one of CTA 0's 1, from 0, got {chunk}$"
        ):
            found.logits(0, chunk)


def test_traces_that_do_not_belong_together_are_refused():
    found = trace(*case(), **SCALES)
    with pytest.raises(TypeError, match=r"^b must be a Trace"):
        first_difference(found, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^a and b must be of one schedule, got Schedule"):
        first_difference(found, trace(*case(), **SCALES, schedule=Schedule(split=2)))
    with pytest.raises(
        ValueError, match=r"^a and b must be of one list of keys, got 50 and 49 keys$"
    ):
        first_difference(found, trace(*case(49), **SCALES))


def test_a_step_must_be_a_function():
    with pytest.raises(TypeError, match=r"^rescale must be a function, got None$"):
        replace(CONTRACT, rescale=None)  # type: ignore[arg-type]
