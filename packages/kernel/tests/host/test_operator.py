"""The PyTorch operator: its shapes without a GPU, and its schedules by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla_kernel import BASE, LOW_LATENCY
from sparse_mla_kernel.host import operator

FAST = "^schedule must be base, low-latency, low-latency-4 or low-latency-2, got 'fast'$"


def tensors(device: str) -> list[torch.Tensor]:
    """``query``, ``kv``, ``rows`` and ``valid``: 3 rows of 32 heads and 8 keys."""
    return [
        torch.zeros(3, 32, 576, dtype=torch.uint8, device=device),
        torch.zeros(5, 576, dtype=torch.uint8, device=device),
        torch.zeros(3, 8, dtype=torch.int32, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
    ]


@pytest.mark.parametrize("more", [(), (16,), (None, "low-latency")])
def test_the_operator_knows_its_shapes(more: tuple) -> None:
    latent, lse = torch.ops.sparse_mla.decode(*tensors("meta"), 0.1, 1.0, *more)
    assert latent.shape == (3, 32, 512)
    assert latent.dtype == torch.bfloat16
    assert lse.shape == (3, 32)
    assert lse.dtype == torch.float32
    assert latent.device.type == lse.device.type == "meta"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_the_operator_refuses(device: str) -> None:
    query, *keys = tensors(device)
    with pytest.raises(ValueError, match=FAST):
        torch.ops.sparse_mla.decode(query, *keys, 0.1, 1.0, None, "fast")
    says = r"^query must have 3 dimensions, got shape \[32, 576\]$"
    with pytest.raises(ValueError, match=says):
        torch.ops.sparse_mla.decode(query[0], *keys, 0.1, 1.0)


def test_the_operator_takes_a_schedule_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []

    def decode(*_: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(named)
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(operator, "sparse_decode", decode)
    for more in ((), (16, "low-latency-4")):
        torch.ops.sparse_mla.decode(*tensors("cpu"), 0.1, 2.0, *more)
    scales = {"scale_log2": 0.1, "out_scale": 2.0}
    assert taken == [
        {**scales, "heads": None, "schedule": BASE},
        {**scales, "heads": 16, "schedule": replace(LOW_LATENCY, split=4)},
    ]
