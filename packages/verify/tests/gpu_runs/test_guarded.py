from concurrent.futures import Future
from dataclasses import asdict, replace

import numpy as np
import pytest

from sparse_mla_verify.audit import claims, collect
from sparse_mla_verify.evidence.evidence import LIVE, RECORDED, Evidence
from sparse_mla_verify.evidence.recordings import Host, load, shipped
from sparse_mla_verify.gpu_runs import guarded
from sparse_mla_verify.gpu_runs.guarded import (
    GIVEN,
    OUTSIDE,
    ROWS,
    SHAPES,
    GuardedRun,
    Layout,
)
from sparse_mla_verify.gpu_runs.unmapped import tensor_at
from sparse_mla_verify.inputs.cases import NAN_BYTE
from sparse_mla_verify.inputs.schedules import BASE, LOW_LATENCY, REFERENCE
from sparse_mla_verify.measure.predict import predict

FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture(scope="module", params=SHAPES)
def case(request):
    return guarded.guarded_case(request.param, BASE)


# Inputs


def counting(case):
    return np.arange(case.rows.shape[1]) < case.counts[:, None]


def inside(case):
    return (case.rows >= 0) & (case.rows < ROWS)


def test_all_that_counts_is_a_row_of_the_cache_or_one_of_the_ids_outside(case):
    assert case.kv.shape == (ROWS, 576)
    assert case.kv.nbytes == guarded.MAPPED == 9 * 2**21
    within = counting(case)
    assert set(case.rows[within & ~inside(case)]) == set(OUTSIDE)
    assert set(case.rows[~within]) <= {ROWS, -1}
    named = np.unique(case.rows[inside(case)])
    assert (named[0], named[-1]) == (0, ROWS - 1)
    assert not np.any(case.kv[named] & 0x7F == NAN_BYTE)
    assert np.all(np.delete(case.kv, named, axis=0) == NAN_BYTE)


def test_ids_outside_stand_everywhere_and_entries_past_the_count_exist():
    case = guarded.guarded_case("guarded/32-heads", BASE)
    shares = [np.mean(inside(case)[r, :n]) for r, n in enumerate(case.counts)]
    assert min(shares) == 0  # a row of them alone
    assert any(np.sum(inside(case)[r, :n]) == 1 for r, n in enumerate(case.counts))
    assert np.all(case.counts < case.rows.shape[1])
    first = {case.rows[r, 0] in OUTSIDE for r in range(case.batch)}
    last = {case.rows[r, n - 1] in OUTSIDE for r, n in enumerate(case.counts)}
    assert first == last == {True, False}


def test_rows_that_no_list_names_stand_past_the_counts_alone(case):
    other, within = guarded.unnamed(case), counting(case)
    assert set(other.rows[~within]) == {ROWS, ROWS + 1}
    longer = ROWS + guarded.MORE_ROWS
    assert not np.any((other.rows[within] >= ROWS) & (other.rows[within] < longer))
    assert np.array_equal(other.rows[within & inside(case)], case.rows[within & inside(case)])
    assert np.array_equal(inside(other)[within], inside(case)[within])
    assert other.digest() != case.digest()


def test_the_reference_gives_the_same_bits_either_way():
    case = guarded.guarded_case("guarded/16-heads", LOW_LATENCY).row(0)
    for one, other in zip(predict(case), predict(guarded.unnamed(case)), strict=True):
        assert np.array_equal(one, other)
        assert not np.any(one == 0)


def test_the_kernels_are_those_of_the_other_recordings_in_both_sizes_of_clusters():
    from sparse_mla_kernel.kernels.low_latency.decode import tiles_of

    for schedule, model in REFERENCE.items():
        made = [guarded.guarded_case(name, schedule) for name in SHAPES]
        assert {c.signature.key for c in made} <= load(shipped(schedule)).machine_code.keys()
        if schedule != BASE:
            assert {tiles_of(c.batch, c.heads, model.split) for c in made} == {1, 2}
        # Rows of which each CTA has one chunk, and of which it has several.
        counts = np.concatenate([c.counts for c in made])
        assert counts.min() <= model.chunk < model.split * model.chunk < counts.max()


def test_a_tensor_is_made_of_an_address_alone():
    data = np.arange(3 * 576, dtype=np.uint32).astype(np.uint8).reshape(3, 576)
    made = tensor_at(data.ctypes.data + 576, 2, 576, None)
    assert np.array_equal(made.numpy(), data[1:])
    assert tensor_at(data.ctypes.data, 2**31 - 1, 576, None).shape == (2**31 - 1, 576)


# The recording

HOST = Host("2000-01-01", "GPU", 1, "sm_90", *["x"] * 3, "x", "4", "x", "x")


def recording(schedule=BASE):
    """The one that ships, of another machine."""
    found = guarded.load(guarded.shipped()).of(schedule)
    rows = [next(r for r in found.given_rows if r.id == id_) for id_ in (*OUTSIDE, 0, ROWS - 1)]
    return replace(found, host=HOST, given_rows=tuple(rows))


def evidence(found, source=RECORDED, **changes):
    compiled = recording().machine_code | {"another": "bb"}
    made = Evidence(source, HOST, (), {}, {}, compiled=compiled, compiler="4", guarded=found)
    return replace(made, **changes)


def verdict(*arguments, **changes):
    claim = next(c for c in claims.all_claims() if c.name == claims.UNREAD)
    return claim.decide(evidence(*arguments, **changes))


@pytest.mark.parametrize("source", [LIVE, RECORDED])
def test_the_claim_holds_where_decodes_do_not_fault_and_reads_do(source):
    found = verdict(recording(), source)
    assert found.status is claims.Status.PASS
    assert found.figures == (
        "0 of 6 runs fault, 0 of 1,723,680 elements differ; given the row, 5 of 5 fault"
    )
    assert guarded.holds(recording())


def with_run(**changes):
    first, *rest = recording().runs
    return replace(recording(), runs=(replace(first, **changes), *rest))


def with_row(index, **changes):
    rows = list(recording().given_rows)
    rows[index] = replace(rows[index], **changes)
    return replace(recording(), given_rows=tuple(rows))


@pytest.mark.parametrize(
    ("found", "detail"),
    [
        (with_run(error=FAULT, elements=0), FAULT),
        (with_run(differing=1, first="[0]: expected"), "[0]: expected"),
        (with_row(1, error=""), f"row {ROWS} was read, and did not fault"),
        (with_row(1, error="ValueError"), f"row {ROWS} was read, and did not fault"),
        (with_row(-1, error=FAULT), f"row {ROWS - 1} is mapped: {FAULT}"),
    ],
)
def test_a_fault_a_bit_and_a_read_without_a_fault_fail_the_claim(found, detail):
    decided = verdict(found)
    assert decided.status is claims.Status.FAIL
    assert detail in decided.details[0]
    assert not guarded.holds(found)


def test_other_bits_than_the_reference_s_fail_the_claim():
    decided = verdict(with_run(digests=("0" * 32,) * 3))
    assert decided.status is claims.Status.FAIL
    assert "row 0: other bits than the reference's" in decided.details[0]


@pytest.mark.parametrize(
    ("found", "changes", "why"),
    [
        (None, {}, "was not looked at"),
        (recording(), {"compiled": {"another": "bb"}}, "3 of 3 kernels differ"),
        (recording(), {"compiler": "5"}, "compiled by DSL 5 here, by 4 there"),
        (recording(), {"compiled": {}, "notes": ("no DSL",)}, "no DSL"),
        (replace(recording(), runs=recording().runs[1:]), {}, "not recorded"),
        (replace(recording(), given_rows=recording().given_rows[1:]), {}, "not recorded"),
        (recording().of(LOW_LATENCY), {}, "0 of 0 kernels"),
        (with_run(elements=1), {}, "1 elements, not 24624"),
        (with_run(digests=()), {}, "elements, not"),
        (with_run(inputs="aa"), {}, "other inputs"),
        (with_run(case="guarded/none"), {}, "guarded/none: no case of today's"),
        (
            replace(recording(), machine_code=dict([*recording().machine_code.items()][1:])),
            {},
            "other machine code",
        ),
        (replace(recording(), layout=Layout(ROWS, guarded.MAPPED, 0, 0)), {}, "bytes unmapped"),
        (replace(recording(), layout=Layout(ROWS, 2**40, 2**40, 2**40)), {}, "bytes mapped"),
    ],
)
def test_another_code_and_a_part_of_a_recording_decide_nothing(found, changes, why):
    decided = verdict(found, **changes)
    assert decided.status is claims.Status.UNDECIDED
    assert why in decided.figures


def test_a_recording_is_read_as_it_was_written_and_divided_by_schedule(tmp_path):
    one, other = recording(), recording(LOW_LATENCY)
    both = replace(
        one,
        machine_code=one.machine_code | other.machine_code,
        runs=one.runs + other.runs,
        given_rows=one.given_rows + other.given_rows,
    )
    path = tmp_path / "x.json"
    both.save(path)
    assert guarded.load(path) == both
    assert both.of(BASE) == one
    assert both.of(LOW_LATENCY) == other
    assert len(guarded.said(both)) == 1 + len(both.runs) + len(both.given_rows)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no recording of guarded caches"):
        guarded.load(path)


def done(value):
    future = Future()
    future.set_result(value)
    return future


def test_bits_that_differ_are_counted_and_a_fault_has_none(tmp_path):
    name = "guarded/16-heads"
    bits = np.full((3, 16, 512), 7, np.uint16), np.full((3, 16), 9, np.uint32)
    rows = [done((bits[0][r : r + 1], bits[1][r : r + 1])) for r in range(3)]
    runs = [GuardedRun(BASE, name, given, "key", "inputs") for given in GIVEN]
    layout = asdict(Layout(ROWS, guarded.MAPPED, 1, 1))
    (tmp_path / "0").mkdir()
    latent = bits[0].copy()
    latent[1, 2, 3] ^= 1
    np.savez(tmp_path / "0" / guarded._file_of(runs[0]), latent=latent, lse=bits[1])
    runs[1] = replace(runs[1], error=FAULT)
    found = {
        "host": asdict(HOST),
        "layout": layout,
        "machine_code": {"key": "aa"},
        "given_rows": [],
        "runs": list(map(asdict, runs)),
    }
    made = guarded._gathered([found], {(BASE, name): rows}, tmp_path)
    assert [(r.differing, r.elements, r.error) for r in made.runs] == [
        (1, 3 * 16 * 513, ""),
        (0, 0, FAULT),
    ]
    assert "[1, 2, 3]" in made.runs[0].first
    same = [a == b for a, b in zip(made.runs[0].digests, guarded.row_digests(bits), strict=True)]
    assert same == [True, False, True]
    other = found | {"layout": layout | {"before": 2}, "runs": []}
    (tmp_path / "0").rename(tmp_path / "1")
    both = guarded._gathered([other, found], {(BASE, name): rows}, tmp_path)
    assert both.layout.before == 1  # the least of what the processes reserved


@pytest.mark.parametrize("schedule", REFERENCE)
def test_what_ships_is_of_todays_inputs_and_bits(schedule):
    found = collect.guarded_caches(schedule)
    assert guarded.holds(found)
    machine_code = load(shipped(schedule)).machine_code
    assert found.machine_code.items() <= machine_code.items()
    assert guarded.stale(found) == []
    assert guarded.unpredicted(found) == []
