"""A mailbox's memory: the arguments that it takes, and what it reports. Without a GPU."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_mla_kernel import DcpMailbox, PeerTimeoutError, Stage

SIZES = {"ranks": 2, "owner_heads": 8, "cap": 3}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"owner_heads": 12},
            ValueError,
            "owner_heads x ranks must be a positive multiple of 16, got 12 x 2 = 24",
        ),
        (
            {"owner_heads": 0},
            ValueError,
            "owner_heads x ranks must be a positive multiple of 16, got 0 x 2 = 0",
        ),
        ({"owner_heads": 8.0}, TypeError, "owner_heads must be an int, got 8.0 (float)"),
        ({"ranks": 0}, ValueError, "ranks must be from 1 to 32, got 0"),
        ({"ranks": 33, "owner_heads": 16}, ValueError, "ranks must be from 1 to 32, got 33"),
        ({"ranks": "2"}, TypeError, "ranks must be an int, got '2' (str)"),
        ({"cap": 0}, ValueError, "cap must be from 1 to 65535, got 0"),
        ({"cap": 65536}, ValueError, "cap must be from 1 to 65535, got 65536"),
        ({"cap": 3.0}, TypeError, "cap must be an int, got 3.0 (float)"),
        ({"padded": 15}, ValueError, "padded must be at least owner_heads x ranks, 16, got 15"),
        ({"padded": 16.0}, TypeError, "padded must be an int, got 16.0 (float)"),
        (
            {"timeout_s": 0},
            ValueError,
            "timeout_s must be above 0 and at most 3600 seconds, got 0",
        ),
        (
            {"timeout_s": 3600.5},
            ValueError,
            "timeout_s must be above 0 and at most 3600 seconds, got 3600.5",
        ),
        (
            {"timeout_s": float("nan")},
            ValueError,
            "timeout_s must be above 0 and at most 3600 seconds, got nan",
        ),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be an int or a float, got str"),
        ({"timeout_s": True}, TypeError, "timeout_s must be an int or a float, got bool"),
        ({"device": "cpu"}, ValueError, "device must be a CUDA device, got cpu"),
    ],
)
def test_a_wrong_mailbox(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(says)}$"):
        DcpMailbox.emulated(**SIZES | change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_cuda_device() -> None:
    says = "^device must be a CUDA device that PyTorch can use, got cuda, and PyTorch finds none"
    with pytest.raises(RuntimeError, match=says):
        DcpMailbox.emulated(**SIZES)


@pytest.mark.parametrize(("stage", "word"), [(Stage.QUERY, "query"), (Stage.PARTIAL, "partial")])
def test_a_lost_peer(stage: Stage, word: str, stand_in: Callable[..., DcpMailbox]) -> None:
    says = (
        f"rank 1 waited 0.25 s for rank 5's {word} of row 6, head 7; "
        "the mailbox must be reset on every rank before the next step"
    )
    with pytest.raises(PeerTimeoutError, match=f"^{re.escape(says)}$") as caught:
        stand_in(report=(stage, 5, 6, 7)).check()
    error = caught.value
    assert (error.waiting, error.rank, error.stage) == (1, 5, stage)
    assert (error.row, error.head, error.timeout_s) == (6, 7, 0.25)


def test_no_lost_peer(stand_in: Callable[..., DcpMailbox]) -> None:
    stand_in().check()
    stand_in(report=(0, 5, 6, 7)).check()
