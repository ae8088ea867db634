"""The memory of a mailbox: shared by processes over NVLink, or by emulated ranks on one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from sparse_mla_kernel.checks import (
    MAX_BATCH,
    MAX_RANKS,
    check_cuda,
    check_int,
    kind_of,
    resolve_device,
)
from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.mailbox.layout import (
    EPOCH,
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
        stage: What it waited for: a query row or a partial row.
        row: The decode row.
        head: The head: in ``Stage.QUERY`` counted among all ranks' heads, in ``Stage.PARTIAL``
            among the heads of the rank that waited.
        timeout_s: The timeout, in seconds.
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
    """One rank's mailbox. :meth:`symmetric` and :meth:`emulated` make mailboxes.

    Attributes:
        box: The layout, the same on every rank.
        rank: This rank.
        device: The device that the buffer is on.
        buffer: The memory, ``[box.size]`` bytes.
        timeout_s: How long one wait can last, in seconds.
        arguments: The mailbox as the kernels take it.
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
        """This process's mailbox in a group of processes that have a GPU each; all must call it.

        The memory comes from ``torch.distributed._symmetric_memory``, and the other processes write
        to it over NVLink. No multicast is used: this function sets the environment variable
        ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` to 1, unless the variable is set already, so that
        PyTorch makes no multicast object.

        Args:
            group: The processes; None for all of them. :meth:`reset` waits at the group's barrier,
                with the group's timeout.
            owner_heads: Heads that one rank owns. Times the group's size it is a multiple of 16.
            cap: Rows that the mailbox has room for, 1 to 65535.
            padded: Heads that a row of the q mailbox has room for; all ranks' heads if left out.
            timeout_s: How long one wait can last, in seconds: above 0 and at most 3600.
            device: This process's GPU.

        Raises:
            TypeError: An argument is of another type.
            ValueError: An argument is out of range.
            RuntimeError: PyTorch finds no CUDA device on this computer, or can't map the group's
                memory.
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
            raise RuntimeError(
                "PyTorch's symmetric memory must map this rank's buffer at its own address, "
                f"{buffer.data_ptr():#x}, got {views[rank].data_ptr():#x}"
            )

        def barrier() -> None:
            dist.barrier(group=group, device_ids=[where.index])

        mailbox = cls(box, rank, buffer, [v.data_ptr() for v in views], timeout_s, barrier)
        mailbox._keep_alive = handle  # its end would unmap the peers' memory
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

        On one stream, launch each kernel of a step for every rank before the next kernel for any
        rank: a kernel waits for what the previous kernel of the other ranks sent.

        Args:
            ranks: Ranks, 1 to 32.
            owner_heads: Heads that one rank owns. Times ``ranks`` it is a multiple of 16.
            cap: Rows that the mailbox has room for, 1 to 65535.
            padded: Heads that a row of the q mailbox has room for; all ranks' heads if left out.
            timeout_s: How long one wait can last, in seconds: above 0 and at most 3600.
            device: A CUDA device.

        Raises:
            TypeError: An argument is of another type.
            ValueError: An argument is out of range.
            RuntimeError: PyTorch finds no CUDA device on this computer.
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
        """``(owner_heads, ranks, cap)``, which ``compile_sparse`` takes as ``push``."""
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
        """How many rows each rank has not sent to this mailbox because they were not finite.

        Returns:
            ``[ranks]`` int32: one count for each rank; a row counts once for each head. A copy,
            made on the current stream after the kernels that were launched on it.
        """
        return self._counters().clone()

    def epoch(self) -> int:
        """The number of steps that this rank has finished since the last reset, modulo 2^32.

        Waits for the kernels on the current stream.
        """
        return int(self._state[EPOCH].item()) & 0xFFFFFFFF

    def check(self) -> None:
        """Raise if a kernel that has run waited for another rank in vain.

        The kernel's report lies in host memory, so that this function waits for nothing.

        Raises:
            PeerTimeoutError: A kernel waited longer than the timeout.
        """
        stage, rank, row, head = self._report_words.tolist()
        if stage:
            raise PeerTimeoutError(self.rank, rank, Stage(stage), row, head, self.timeout_s)

    def reset(self) -> None:
        """Empty the mailbox and start again at epoch 0. Every rank of the group must call it.

        Waits until the device is idle. A mailbox of :meth:`symmetric` also waits for the other
        ranks before and after: the function returns when the mailbox of every rank is empty.
        """
        torch.cuda.synchronize(self.device)
        self._barrier()
        # A region fills whole words and ends at a multiple of 256 bytes, with padding: each range
        # below is a region with its padding.
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
    """The layout of a mailbox, after all checks of what a caller gave."""
    check_int("owner_heads", owner_heads)
    check_int("cap", cap)
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    heads = ranks * owner_heads
    if owner_heads < 1 or heads % TILE_HEADS:
        raise ValueError(
            f"owner_heads x ranks must be a positive multiple of {TILE_HEADS}, "
            f"got {owner_heads} x {ranks} = {heads}"
        )
    if not 1 <= cap <= MAX_BATCH:
        raise ValueError(f"cap must be from 1 to {MAX_BATCH}, got {cap}")
    room = heads if padded is None else padded
    check_int("padded", room)
    if room < heads:
        raise ValueError(f"padded must be at least owner_heads x ranks, {heads}, got {room}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be an int or a float, got {kind_of(timeout_s)}")
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be above 0 and at most {_MAX_TIMEOUT_S:g} seconds, got {timeout_s}"
        )
    return MailboxLayout(room, owner_heads, ranks, cap)


def _cuda_device(device: torch.device | str | int) -> torch.device:
    where = resolve_device(device)
    check_cuda(where)
    return where
