"""A mailbox's memory: the arguments that it takes, and what it reports. Without a GPU."""

import contextlib
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_mla_kernel import DcpMailbox, PeerTimeoutError, Stage
from sparse_mla_kernel.mailbox import memory

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


# ---- on the CPU: everything but the kernels -----------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Lets mailboxes lie in the CPU's memory; the devices that were waited for."""
    waited: list[object] = []
    zeros = torch.zeros
    monkeypatch.setattr(memory, "_cuda_device", torch.device)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **k: zeros(*size, **k))
    return waited


def emulated(**change: Any) -> list[DcpMailbox]:
    sizes: dict[str, Any] = {"ranks": 4, "owner_heads": 8, "cap": 3, "padded": 40, "device": "cpu"}
    return DcpMailbox.emulated(**sizes | change)


def words(tensor: torch.Tensor) -> set[int]:
    """The different 32-bit words of a region."""
    return {word & 0xFFFFFFFF for word in tensor.reshape(-1).view(torch.int32).unique().tolist()}


def is_empty(mailbox: DcpMailbox) -> bool:
    regions = [words(part) for part in (mailbox.query, mailbox.payload, mailbox.lse)]
    counts = mailbox.dropped().tolist()
    return regions == [{0xFFFFFFFF}, {0x80000000}, {0xFFFFFFFF}] and counts == [0] * 4


def test_a_mailbox_starts_empty(on_cpu: list[object]) -> None:
    mailboxes = emulated()
    assert [mailbox.rank for mailbox in mailboxes] == [0, 1, 2, 3]
    for mailbox in mailboxes:
        assert is_empty(mailbox)
        assert mailbox.epoch() == 0
        assert mailbox.push == (8, 4, 3)
        mailbox.check()
    assert emulated(padded=None)[0].box.padded == 32


def test_the_regions_of_a_mailbox(on_cpu: list[object]) -> None:
    """Their shapes, and that each lies where the layout says, without touching another."""
    mailbox, *_ = emulated()
    box, start = mailbox.box, mailbox.buffer.data_ptr()
    assert mailbox.buffer.numel() == box.size
    regions = {
        "query": ((2, 3, 40, 576), torch.uint8, box.query),
        "payload": ((2, 4, 3, 8, 512), torch.bfloat16, box.payload),
        "lse": ((2, 4, 3, 8), torch.float32, box.lse),
    }
    for name, (shape, dtype, offset) in regions.items():
        region = getattr(mailbox, name)
        assert (tuple(region.shape), region.dtype) == (shape, dtype)
        assert region.data_ptr() == start + offset


def test_reset_empties_a_used_mailbox(on_cpu: list[object]) -> None:
    mailbox, *_ = emulated()
    mailbox.buffer.fill_(7)
    mailbox._state.fill_(-1)
    mailbox._report[:] = torch.tensor([Stage.PARTIAL, 1, 2, 3])
    assert mailbox.dropped().tolist() == [0x07070707] * 4
    assert mailbox.epoch() == 0xFFFFFFFF
    with pytest.raises(PeerTimeoutError, match=r"rank 0 waited 10 s for rank 1's partial of row 2"):
        mailbox.check()
    mailbox.reset()
    assert is_empty(mailbox)
    assert words(mailbox._state) == {0}
    assert words(mailbox.buffer[mailbox.box.dropped :]) == {0}
    mailbox.check()


def test_the_epoch_is_the_first_word_of_the_device_state(on_cpu: list[object]) -> None:
    mailbox, *_ = emulated()
    mailbox._state[:] = torch.tensor([5, 6, 7, 8])
    assert mailbox.epoch() == 5


def test_dropped_is_a_copy(on_cpu: list[object]) -> None:
    mailbox, *_ = emulated()
    mailbox.dropped().fill_(9)
    assert mailbox.dropped().tolist() == [0] * 4


def test_reset_waits_for_the_device_and_the_other_ranks(on_cpu: list[object]) -> None:
    events: list[str] = []
    mailbox, *_ = emulated()
    on_cpu.clear()
    mailbox._barrier = lambda: events.append(
        f"barrier, empty: {is_empty(mailbox)}, waits: {len(on_cpu)}"
    )
    mailbox.buffer.fill_(7)
    mailbox.reset()
    assert events == ["barrier, empty: False, waits: 1", "barrier, empty: True, waits: 2"]
    assert set(on_cpu) == {torch.device("cpu")}


def test_what_kernels_are_given(on_cpu: list[object]) -> None:
    mailboxes = emulated(timeout_s=0.5)
    starts = [mailbox.buffer.data_ptr() for mailbox in mailboxes]
    for rank, mailbox in enumerate(mailboxes):
        assert mailbox._peers.tolist() == starts
        assert mailbox._state.numel() == 4
        assert mailbox.arguments == (
            starts[rank],
            mailbox._peers.data_ptr(),
            mailbox._state.data_ptr(),
            mailbox._report.data_ptr(),
            500_000_000,
            rank,
        )
    assert mailboxes[0].timeout_s == 0.5
    assert emulated()[0].arguments.timeout_ns == 10_000_000_000


def test_only_the_report_lies_in_pinned_memory(
    on_cpu: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel writes the report, and the host reads it without a transfer."""
    pinned: list[object] = []
    zeros = torch.zeros

    def recorded(size: int, *, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        if pin_memory:
            pinned.append(size)
        return zeros(size, **given)

    monkeypatch.setattr(torch, "zeros", recorded)
    emulated()
    assert pinned == [4] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 1, "owner_heads": 16, "cap": 1, "padded": None, "timeout_s": 1e-3},
        {"ranks": 32, "owner_heads": 1, "padded": 32, "timeout_s": 3600},
        {"ranks": 1, "owner_heads": 16, "cap": 65535, "padded": None},
    ],
)
def test_the_extremes_of_the_sizes_are_allowed(change: dict[str, Any]) -> None:
    named: dict[str, Any] = {
        "ranks": 2,
        "owner_heads": 8,
        "cap": 3,
        "padded": 16,
        "timeout_s": 1.0,
    } | change
    box = memory._checked_layout(**named)
    assert (box.ranks, box.owner_heads, box.cap) == (
        named["ranks"],
        named["owner_heads"],
        named["cap"],
    )
    assert box.padded == (named["padded"] or 16)


# ---- the symmetric form, with stand-ins for torch.distributed ------------------------------------


class Group:
    """A group of 2 processes with 8 heads each, of which this one is rank 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        self.buffers: list[torch.Tensor] = []
        self.barriers: list[dict[str, object]] = []
        self.elsewhere = False
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2 if group is self else 0)
        monkeypatch.setattr(dist, "get_rank", lambda group: 1 if group is self else 0)
        monkeypatch.setattr(dist, "barrier", lambda **given: self.barriers.append(given))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(symm_mem, "empty", self.empty)
        monkeypatch.setattr(symm_mem, "rendezvous", lambda *_: self)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        return self.buffers[1]

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        buffer = self.buffers[0 if self.elsewhere else rank]
        assert (tuple(buffer.shape), buffer.dtype) == (sizes, dtype)
        return buffer


@pytest.fixture
def group(on_cpu: list[object], monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    return Group(monkeypatch)


def test_a_symmetric_mailbox(group: Group) -> None:
    mailbox = DcpMailbox.symmetric(group, owner_heads=8, cap=3, device="cpu")
    assert (mailbox.rank, mailbox.push, mailbox.box.padded) == (1, (8, 2, 3), 16)
    assert mailbox.buffer is group.buffers[1]
    assert mailbox._peers.tolist() == [buffer.data_ptr() for buffer in group.buffers]
    assert mailbox.timeout_s == 10.0
    assert words(mailbox.query) == {0xFFFFFFFF}
    # Each reset meets the other ranks before and after.
    assert group.barriers == [{"group": group, "device_ids": [None]}] * 2
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_multicast_is_left_as_it_is_set(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    DcpMailbox.symmetric(group, owner_heads=8, cap=3, device="cpu")
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "0"


def test_a_buffer_that_is_mapped_elsewhere(group: Group) -> None:
    group.elsewhere = True
    with pytest.raises(RuntimeError, match=r"must map this rank's buffer at its own address, 0x"):
        DcpMailbox.symmetric(group, owner_heads=8, cap=3, device="cpu")


def test_a_wrong_symmetric_mailbox(group: Group) -> None:
    says = r"^owner_heads x ranks must be a positive multiple of 16, got 12 x 2 = 24$"
    with pytest.raises(ValueError, match=says):
        DcpMailbox.symmetric(group, owner_heads=12, cap=3, device="cpu")
    assert group.buffers == []


def test_no_group_is_the_group_of_all_processes(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group))
    mailbox = DcpMailbox.symmetric(None, owner_heads=8, cap=3, device="cpu")
    assert mailbox.rank == 1
    assert [given["group"] for given in group.barriers] == [group, group]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_symmetric_mailbox_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^device must be .*, got cuda, and PyTorch finds none"):
        DcpMailbox.symmetric(Group(monkeypatch), owner_heads=8, cap=3)
