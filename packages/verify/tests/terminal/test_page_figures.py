import pytest

from sparse_mla_verify.terminal.page_figures import between_marks


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match=r"must have one pair of marks .*, got 0"):
        between_marks("no marks", "table")
