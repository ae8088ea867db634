from dataclasses import replace

import pytest

from sparse_mla_verify.audit import claims, collect
from sparse_mla_verify.evidence import guarded_recordings
from sparse_mla_verify.evidence.evidence import LIVE, RECORDED, Evidence
from sparse_mla_verify.evidence.guarded_recordings import Layout
from sparse_mla_verify.evidence.recordings import Host, load, shipped
from sparse_mla_verify.inputs.guarded_cases import MAPPED, OUTSIDE, ROWS
from sparse_mla_verify.inputs.schedules import BASE, LOW_LATENCY, REFERENCE

FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"
HOST = Host("2000-01-01", "GPU", 1, "sm_90", "x", "x", "x", "x", "4", "x", "x")


def recording(schedule=BASE):
    """The one that ships, of another machine."""
    found = guarded_recordings.load(guarded_recordings.shipped()).of(schedule)
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
        "0 of 6 decodes fault; 0 of 1,723,680 elements differ; 5 of 5 reads of unmapped rows fault"
    )
    assert guarded_recordings.holds(recording())


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
    assert not guarded_recordings.holds(found)


def test_a_run_that_compared_nothing_holds_nothing():
    assert not with_run(elements=0).runs[0].same
    assert not guarded_recordings.holds(with_run(elements=0))


def test_a_reservation_of_64_mib_on_either_side_is_enough():
    least = 64 * 2**20
    assert not guarded_recordings.stale(
        replace(recording(), layout=Layout(ROWS, MAPPED, least, least))
    )
    for sides in ((least - 1, least), (least, least - 1)):
        found = replace(recording(), layout=Layout(ROWS, MAPPED, *sides))
        assert "bytes unmapped" in guarded_recordings.stale(found)[0]


def test_a_recording_is_said_with_each_error():
    said = guarded_recordings.said(with_row(-1, error=FAULT))
    mapped, unmapped = (f"given row {id_} (" for id_ in (0, OUTSIDE[0]))
    assert next(line for line in said if mapped in line).endswith(": no error")
    assert next(line for line in said if unmapped in line).endswith(f": {FAULT}")
    assert said[-1].endswith(f": {FAULT}")
    assert said[1].endswith("elements differ ")


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
        (replace(recording(), layout=Layout(ROWS, MAPPED, 0, 0)), {}, "bytes unmapped"),
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
    assert guarded_recordings.load(path) == both
    assert both.of(BASE) == one
    assert both.of(LOW_LATENCY) == other
    assert len(guarded_recordings.said(both)) == 1 + len(both.runs) + len(both.given_rows)
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be a recording of guarded caches"):
        guarded_recordings.load(path)


@pytest.mark.parametrize("schedule", REFERENCE)
def test_what_ships_is_of_todays_inputs_and_bits(schedule):
    found = collect.guarded_caches(schedule)
    assert guarded_recordings.holds(found)
    path = shipped(schedule)
    assert path is not None
    machine_code = load(path).machine_code
    assert found.machine_code.items() <= machine_code.items()
    assert guarded_recordings.stale(found) == []
    assert guarded_recordings.unpredicted(found) == []
