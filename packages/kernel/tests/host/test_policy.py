"""Which batches run this kernel, and by which schedule."""

from dataclasses import replace
from typing import Any

import pytest

from sparse_mla_kernel import (
    BASE,
    LOW_LATENCY,
    parse_schedules,
    parse_table,
    schedule_for,
    sparse_for,
)
from sparse_mla_kernel.host import policy

SPLIT_4 = replace(LOW_LATENCY, split=4)


def test_later_entries_win() -> None:
    table = parse_table("1-4:sparse, 2:split,4-5:split")
    assert table == {1: "sparse", 2: "split", 3: "sparse", 4: "split", 5: "split"}


def test_a_table_decides() -> None:
    table = "1-2:split,3-8:sparse"
    assert [sparse_for(rows, 96, 96, table=table) for rows in (1, 2, 3, 8, 9)] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("gathered", "padded"), [(24, 96), (0, 96), (-16, 96), (112, 96)])
def test_heads_that_do_not_fit(gathered: int, padded: int) -> None:
    assert not sparse_for(1, gathered, padded, table="1:sparse")


@pytest.mark.parametrize("rows", [0, -1, 10**9])
def test_rows_that_no_table_names(rows: int) -> None:
    assert not sparse_for(rows, 96, 96)


@pytest.mark.parametrize(
    "entry", ["1-2", "2-1:sparse", "0:split", "1:dense", "a:sparse", "1--2:split", "\uff11:sparse"]
)
def test_malformed_tables(entry: str) -> None:
    says = (
        "table must have entries FIRST-LAST:sparse or FIRST-LAST:split with "
        f"1 <= FIRST <= LAST <= 65535, got the entry '{entry}'"
    )
    with pytest.raises(ValueError, match=f"^{says}$"):
        parse_table(f"1:sparse,{entry}")


def test_sizes_are_ints() -> None:
    with pytest.raises(TypeError, match=r"^rows must be an int, got 1\.0 \(float\)$"):
        sparse_for(1.0, 96, 96)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rows", "gathered", "padded"])
def test_every_size_is_an_int(name: str) -> None:
    sizes: dict[str, Any] = {"rows": 1, "gathered": 96, "padded": 96} | {name: 96.0}
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got 96\.0 \(float\)$"):
        sparse_for(**sizes)


def test_the_largest_batch_has_a_place_in_a_table() -> None:
    assert parse_table("65535:sparse") == {65535: "sparse"}
    assert parse_schedules("65535x16:base") == {16: {65535: BASE}}


def test_a_table_is_text() -> None:
    with pytest.raises(TypeError, match=r"^table must be a str such as '1-8:sparse', got int$"):
        parse_table(5)  # type: ignore[arg-type]


# Schedules

TABLE = "1-2x16:low-latency,3-8x16:low-latency-4,1x96:low-latency-4,4x96:low-latency-2,16x96:base"


def test_a_table_of_schedules() -> None:
    assert parse_schedules("1-2x16:base, 2x16:low-latency,5x96:low-latency-4") == {
        16: {1: BASE, 2: LOW_LATENCY},
        96: {5: SPLIT_4},
    }


@pytest.mark.parametrize(
    ("rows", "heads", "schedule"),
    [
        (1, 16, LOW_LATENCY),
        (3, 16, SPLIT_4),
        (8, 16, SPLIT_4),
        (9, 16, SPLIT_4),  # past the largest: the largest
        (1, 96, SPLIT_4),
        (2, 96, replace(LOW_LATENCY, split=2)),  # between: the next larger
        (4, 96, replace(LOW_LATENCY, split=2)),
        (5, 96, BASE),
        (10**9, 96, BASE),
        (1, 32, SPLIT_4),
        (16, 128, BASE),
    ],
)
def test_sizes_that_no_table_names_are_as_the_next_larger(
    rows: int, heads: int, schedule: object
) -> None:
    assert schedule_for(rows, heads, table=TABLE) == schedule


def test_the_shipped_table_names_every_head_count_and_batch_size_of_the_grid() -> None:
    table = parse_schedules(policy.SCHEDULES)
    assert sorted(table) == [16, 64, 96, 128]
    for heads, of_heads in table.items():
        assert sorted(of_heads) == list(range(1, 17))
        assert all(schedule_for(rows, heads) == of_heads[rows] for rows in of_heads)
    assert parse_table(policy.TABLE)


@pytest.mark.parametrize(
    "entry",
    [
        "1:low-latency",
        "1x96",
        "1x96:fast",
        "1x96:low-latency-8",
        "2-1x96:base",
        "0x96:base",
        "65536x96:base",
        "1x0:base",
        "1x24:base",
        "1x-16:base",
        "1 x96:base",
    ],
)
def test_malformed_tables_of_schedules(entry: str) -> None:
    says = (
        "table must have entries FIRST-LASTxHEADS:NAME with 1 <= FIRST <= LAST <= 65535, "
        "HEADS a positive multiple of 16 and NAME base, low-latency, low-latency-4 or "
        f"low-latency-2, got the entry '{entry}'"
    )
    with pytest.raises(ValueError, match=f"^{says}$"):
        schedule_for(1, 96, table=f"1x96:base,{entry}")


def test_a_table_of_schedules_has_entries() -> None:
    with pytest.raises(ValueError, match=r"^table must have one entry or more, got ' , '$"):
        schedule_for(1, 96, table=" , ")
    says = r"^table must be a str such as '1-8x96:low-latency', got int$"
    with pytest.raises(TypeError, match=says):
        parse_schedules(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "heads", "error", "says"),
    [
        (0, 96, ValueError, "rows must be 1 or more, got 0"),
        (1, 24, ValueError, "heads must be a positive multiple of 16, got 24"),
        (1, 0, ValueError, "heads must be a positive multiple of 16, got 0"),
        (1, -16, ValueError, "heads must be a positive multiple of 16, got -16"),
        (1.0, 96, TypeError, r"rows must be an int, got 1\.0 \(float\)"),
        (1, True, TypeError, r"heads must be an int, got True \(bool\)"),
    ],
)
def test_sizes_of_a_batch(rows: int, heads: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}$"):
        schedule_for(rows, heads)
