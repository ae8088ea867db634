"""The memory of a mailbox: over NVLink between processes, or of emulated ranks on one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from sparse_mla_kernel.checks import MAX_RANKS, check_int, resolve_device
from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.mailbox.layout import (
    LSE_SENTINEL,
    PAYLOAD_SENTINEL,
    QUERY_SENTINEL,
    STATE_WORDS,
    MailboxLayout,
)
from sparse_mla_kernel.mailbox.waits import Stage
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, TILE_HEADS

_MAX_TIMEOUT_S = 3600.0


class PeerTimeoutError(RuntimeError):
    """A wait for another rank lasted longer than the mailbox's timeout.

    Args:
        waiting: The rank that waited.
        rank: The rank that it waited for.
        stage: What it waited for.
        row: Of which row.
        head: Of which head: in ``Stage.QUERY`` among all ranks' heads, in ``Stage.PARTIAL`` among
            the waiting rank's own.
        timeout_s: The timeout.
    """

    def __init__(
        self, waiting: int, rank: int, stage: Stage, row: int, head: int, timeout_s: float
    ) -> None:
        super().__init__(
            f"rank {waiting} waited {timeout_s:g} s for rank {rank}'s {stage.name.lower()} of row "
            f"{row}, head {head}; the mailbox must be reset on every rank before the next step"
        )
        self.waiting = waiting
        self.rank = rank
        self.stage = stage
        self.row = row
        self.head = head
        self.timeout_s = timeout_s


class DcpMailbox:
    """One rank's mailbox. Made by :meth:`symmetric` or :meth:`emulated`.

    Attributes:
        box: The layout, the same on every rank.
        rank: This rank.
        device: Where the buffer is.
        buffer: ``[box.size]`` bytes.
        timeout_s: How long one wait may last.
        arguments: What kernels are given.
    """

    def __init__(
        self,
        box: MailboxLayout,
        rank: int,
        buffer: torch.Tensor,
        addresses: Sequence[int],
        timeout_s: float,
        barrier: Callable[[], None],
    ) -> None:
        self.box = box
        self.rank = rank
        self.device = buffer.device
        self.buffer = buffer
        self.timeout_s = timeout_s
        self._barrier = barrier
        self._keep_alive: object = None
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        # Pinned, so that a kernel can write it and the host can read it without a transfer.
        self._report = torch.zeros(4, dtype=torch.int32, pin_memory=True)
        self._report_words = self._report.numpy()
        self.arguments = DeviceMailbox(
            buffer.data_ptr(),
            self._peers.data_ptr(),
            self._state.data_ptr(),
            self._report.data_ptr(),
            round(timeout_s * 1e9),
            rank,
        )
        self.reset()

    @classmethod
    def symmetric(
        cls,
        group: torch.distributed.ProcessGroup | None,
        owner_heads: int,
        cap: int,
        padded: int | None = None,
        *,
        timeout_s: float = 10.0,
        device: torch.device | str | int = "cuda",
    ) -> DcpMailbox:
        """This process's mailbox in a group of processes, one GPU each. Every one must call it.

        Peers write over NVLink to memory of ``torch.distributed._symmetric_memory``. Nothing is
        multicast: the environment variable ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` is set to 1 unless
        it is set already, so that PyTorch makes no multicast object either.

        Args:
            group: The processes; None for all. Its barrier, with its timeout, is what
                :meth:`reset` meets at.
            owner_heads: Heads that one rank owns; times the group's size, a multiple of 16.
            cap: Rows that the mailbox has room for.
            padded: Heads that a row of the q mailbox has room for; all ranks' heads if left out.
            timeout_s: How long one wait may last, in seconds, up to 3600.
            device: This process's GPU.

        Raises:
            TypeError: An argument is of another type.
            ValueError: An argument is out of range.
            RuntimeError: PyTorch can't map the group's memory.
        """
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD if group is None else group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        box = _checked_layout(owner_heads, ranks, cap, padded, timeout_s)
        where = _cuda_device(device)
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        with torch.cuda.device(where):
            buffer = symm_mem.empty(box.size, dtype=torch.uint8, device=where)
            handle = symm_mem.rendezvous(buffer, group)
            views = [handle.get_buffer(r, (box.size,), torch.uint8) for r in range(ranks)]
        if views[rank].data_ptr() != buffer.data_ptr():
            raise RuntimeError("torch's symmetric memory maps this rank's buffer somewhere else")

        def barrier() -> None:
            dist.barrier(group=group, device_ids=[where.index])

        mailbox = cls(box, rank, buffer, [v.data_ptr() for v in views], timeout_s, barrier)
        mailbox._keep_alive = handle  # the peers' memory is unmapped when it goes
        return mailbox

    @classmethod
    def emulated(
        cls,
        ranks: int,
        owner_heads: int,
        cap: int,
        padded: int | None = None,
        *,
        timeout_s: float = 10.0,
        device: torch.device | str | int = "cuda",
    ) -> list[DcpMailbox]:
        """The mailboxes of ``ranks`` ranks in this process, on one GPU.

        On one stream each kernel of a step must be launched for every rank before the next kernel
        is for any: a kernel waits for what the others' last one sent.

        Args:
            ranks: Ranks, 1 to 32.
            owner_heads: As :meth:`symmetric`, with the other arguments.
            cap: See there.
            padded: See there.
            timeout_s: See there.
            device: A CUDA device.

        Raises:
            TypeError: An argument is of another type.
            ValueError: An argument is out of range.
            RuntimeError: There is no usable CUDA device.
        """
        check_int("ranks", ranks)
        box = _checked_layout(owner_heads, ranks, cap, padded, timeout_s)
        where = _cuda_device(device)
        buffers = [torch.empty(box.size, dtype=torch.uint8, device=where) for _ in range(ranks)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        return [
            cls(box, rank, buffer, addresses, timeout_s, lambda: None)
            for rank, buffer in enumerate(buffers)
        ]

    @property
    def push(self) -> tuple[int, int, int]:
        """What ``compile_sparse`` takes as ``push``: ``(owner heads, ranks, cap)``."""
        return (self.box.owner_heads, self.box.ranks, self.box.cap)

    @property
    def query(self) -> torch.Tensor:
        """The q mailbox, ``[2, cap, padded, 576]`` E4M3 bytes."""
        box = self.box
        return self._region(box.query, 2 * box.query_bytes).view(2, box.cap, -1, ROW_COLUMNS)

    @property
    def payload(self) -> torch.Tensor:
        """The partial rows, ``[2, ranks, cap, owner_heads, 512]`` BF16."""
        box = self.box
        flat = self._region(box.payload, 2 * box.payload_bytes).view(torch.bfloat16)
        return flat.view(2, box.ranks, box.cap, box.owner_heads, LATENT_COLUMNS)

    @property
    def lse(self) -> torch.Tensor:
        """The partials' base-2 LSEs, ``[2, ranks, cap, owner_heads]`` f32."""
        box = self.box
        flat = self._region(box.lse, 2 * box.lse_bytes).view(torch.float32)
        return flat.view(2, box.ranks, box.cap, box.owner_heads)

    def _region(self, start: int, size: int) -> torch.Tensor:
        return self.buffer[start : start + size]

    def _counters(self) -> torch.Tensor:
        return self._region(self.box.dropped, 4 * self.box.ranks).view(torch.int32)

    def dropped(self) -> torch.Tensor:
        """``[ranks]`` int32: non-finite rows, one a head, that each rank didn't send here so far.

        A copy, of what the kernels have done that ran on the current stream.
        """
        return self._counters().clone()

    def epoch(self) -> int:
        """Steps that this rank has finished since the last reset, modulo 2^32; synchronises."""
        return int(self._state[0].item()) & 0xFFFFFFFF

    def check(self) -> None:
        """Raise if a wait was lost. Reads host memory; waits for nothing.

        Raises:
            PeerTimeoutError: A kernel that has run gave up on another rank.
        """
        stage, rank, row, head = self._report_words.tolist()
        if stage:
            raise PeerTimeoutError(self.rank, rank, Stage(stage), row, head, self.timeout_s)

    def reset(self) -> None:
        """Empty the mailbox, and start at epoch 0. Every rank of the group must call it.

        Waits until the device is idle, and for the other ranks before and after: in the symmetric
        form it returns when every rank's mailbox is empty.
        """
        torch.cuda.synchronize(self.device)
        self._barrier()
        # Regions are whole words, and parts of 256-byte blocks: the padding is filled with them.
        for start, end, word in (
            (self.box.query, self.box.payload, QUERY_SENTINEL),
            (self.box.payload, self.box.lse, PAYLOAD_SENTINEL),
            (self.box.lse, self.box.dropped, LSE_SENTINEL),
            (self.box.dropped, self.box.size, 0),
        ):
            signed = word - 2**32 if word >= 2**31 else word
            self.buffer[start:end].view(torch.int32).fill_(signed)
        self._state.zero_()
        self._report.zero_()
        torch.cuda.synchronize(self.device)
        self._barrier()


def _checked_layout(
    owner_heads: int, ranks: int, cap: int, padded: int | None, timeout_s: float
) -> MailboxLayout:
    check_int("owner_heads", owner_heads)
    check_int("cap", cap)
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks is {ranks}; it may be 1 to {MAX_RANKS}")
    heads = ranks * owner_heads
    if owner_heads < 1 or heads % TILE_HEADS:
        raise ValueError(
            f"owner_heads is {owner_heads}; times {ranks} ranks it may be a multiple of "
            f"{TILE_HEADS}"
        )
    if not 1 <= cap <= 65535:
        raise ValueError(f"cap is {cap}; it may be 1 to 65535")
    room = heads if padded is None else padded
    check_int("padded", room)
    if room < heads:
        raise ValueError(f"padded is {room}; it may be {heads}, all ranks' heads, or more")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s is a {type(timeout_s).__name__}; it may be a float")
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s is {timeout_s}; it may be up to {_MAX_TIMEOUT_S:g} seconds")
    return MailboxLayout(room, owner_heads, ranks, cap)


def _cuda_device(device: torch.device | str | int) -> torch.device:
    where = resolve_device(device)
    if where.type != "cuda":
        raise ValueError(f"device is {where}; it may be a CUDA device")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {where}; torch finds no usable CUDA device here")
    return where
