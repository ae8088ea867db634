"""Which batches run this kernel."""

import pytest

from sparse_mla_kernel import parse_table, sparse_for


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
    with pytest.raises(ValueError, match="table has the entry"):
        parse_table(f"1:sparse,{entry}")


def test_sizes_are_ints() -> None:
    with pytest.raises(TypeError, match=r"rows is 1\.0, a float"):
        sparse_for(1.0, 96, 96)


def test_a_table_is_text() -> None:
    with pytest.raises(TypeError, match="table is a int; it may be a str"):
        parse_table(5)
