import argparse

import pytest

from sparse_mla_verify.__main__ import COMMANDS
from sparse_mla_verify.terminal.options import one_or_more, positive, spelled_today, whole


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        (
            "python -m sparse_mla_verify.bench run --budget 130",
            "sparse-mla-audit bench run --budget 130",
        ),
        ("python -m sparse_mla_verify.bench stages", "sparse-mla-audit bench stages"),
        ("python -m sparse_mla_verify.hardware", "sparse-mla-audit hardware"),
        ("sparse-mla-audit bench stages", "sparse-mla-audit bench stages"),
        ("python -m sparse_mla_verify explain", "python -m sparse_mla_verify explain"),
        (
            "python -m sparse_mla_verify.bench.stages A B",
            "python -m sparse_mla_verify.bench.stages A B",
        ),
        ("None", "None"),
    ],
)
def test_a_recorded_command_is_spelled_as_it_is_typed_today(recorded, today):
    assert spelled_today(recorded) == today
    assert not today.startswith("sparse-mla-audit") or today.split()[1] in COMMANDS


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (whole, "x", "must be a whole number, got 'x'"),
        (one_or_more, "x", "must be a whole number, got 'x'"),
        (one_or_more, "1.5", "must be a whole number, got '1.5'"),
        (one_or_more, "0", "must be 1 or more, got 0"),
        (positive, "soon", "must be a number above 0, got 'soon'"),
        (positive, "nan", "must be above 0, got nan"),
    ],
)
def test_a_wrong_value_says_what_it_must_be(kind, text, says):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        kind(text)
    assert str(error.value) == says
