"""Schedules: the values that each field can have, by the kernel that runs them."""

from typing import Any

import pytest

from sparse_mla_kernel import Schedule


@pytest.mark.parametrize("field", ["split", "chunk", "qk_chains"])
def test_schedules_out_of_range(field: str) -> None:
    change: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"^{field} must be one of .* for kernel 'base', got 0$"):
        Schedule(**change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernel": "bf16"}, "kernel must be 'base' or 'low_latency', got 'bf16'"),
        ({"kernel": []}, r"kernel must be 'base' or 'low_latency', got \[\]"),
        ({"kernel": "low_latency"}, "qk_chains must be one of 4 for kernel 'low_latency', got 2"),
        ({"deal": 8}, "deal must be one of 0 for kernel 'base', got 8"),
    ],
)
def test_fields_that_do_not_go_together(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        Schedule(**change)


def test_a_number_is_an_int() -> None:
    with pytest.raises(TypeError, match=r"^split must be an int, got 4\.0 \(float\)$"):
        Schedule(split=4.0)  # type: ignore[arg-type]
