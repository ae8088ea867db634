"""A decode step under decode context parallelism: D ranks, a mailbox each, no collective.

``Rank`` is one rank's side of the protocol, one method a kernel. The words of the mailboxes are
real, so that a rank that runs too early (``NotArrived``) or too far ahead (``Overrun``) shows.
``dcp_step`` runs one step of a whole group.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import arguments, mailbox
from sparse_mla_reference.decode import decode_row
from sparse_mla_reference.machine import SM90, Machine
from sparse_mla_reference.mailbox import (
    EMPTY_LSE,
    LSE_SENTINEL,
    PARITIES,
    PAYLOAD_SENTINEL,
    QUERY_SENTINEL,
    Mailbox,
    NotArrived,
    as_words,
    receive,
    send,
)
from sparse_mla_reference.owner_merge import owner_merge
from sparse_mla_reference.schedule import BASE, LATENT, ROW, Schedule


class DcpOutput(NamedTuple):
    """What a step gives.

    Attributes:
        latent: [D, B, H, 512] ``ml_dtypes.bfloat16``: each rank's heads, over the keys of all.
        lse: [D, B, H] float32, natural log; -inf where no rank has a key.
        dropped: [D, D] int32: non-finite rows that an owner (first axis) missed of each rank.
    """

    latent: NDArray[Any]
    lse: NDArray[np.float32]
    dropped: NDArray[np.int32]


class Rank:
    """One rank. A step is ``exchange``, ``decode``, ``merge``, and each waits for its words.

    Args:
        rank: this rank's number.
        mailboxes: every rank's mailbox, by rank.
        schedule: order of the decode's roundings.
        machine: the arithmetic; a GPU's.

    Raises:
        TypeError: ``rank``, ``schedule`` or ``machine`` is of another kind, or ``mailboxes`` is no
            sequence of them.
        ValueError: ``machine`` rounds nothing: words hold float32 and BF16; ``rank`` is not one of
            the group's; or the mailboxes are not those of one group.
    """

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[Mailbox],
        *,
        schedule: Schedule = BASE,
        machine: Machine = SM90,
    ) -> None:
        arguments.check_plan(schedule, machine)
        if machine.real is not np.float32:
            raise ValueError(f"machine must be a GPU's, got {machine.name}")
        _check_sequence("mailboxes", mailboxes, "of Mailbox")
        for place, box in enumerate(mailboxes):
            arguments.check_kind(
                f"mailboxes[{place}]", box, Mailbox, "such as Mailbox.empty() gives"
            )
        if len(mailboxes) == 0:
            raise ValueError("mailboxes must be one a rank, of 1 or more, got 0")
        _check_integer("rank", rank, len(mailboxes) - 1)
        shapes = {box.lse.shape for box in mailboxes}
        if len(shapes) != 1 or mailboxes[rank].lse.shape[1] != len(mailboxes):
            raise ValueError(
                f"mailboxes must be one a rank, all of one size, got {len(mailboxes)} with lse of "
                f"{sorted(shapes)}"
            )
        self.rank = rank
        self.mailboxes = mailboxes
        self.own = mailboxes[rank]
        self.schedule = schedule
        self.machine = machine
        self.epoch = 0
        _, self.ranks, self.cap, self.owner_heads = self.own.lse.shape

    @property
    def parity(self) -> int:
        """Which half of each region this step uses."""
        return self.epoch % PARITIES

    def exchange(self, query: NDArray[Any]) -> None:
        """Send this rank's heads, [B, H, 576] E4M3, to every rank.

        Raises:
            TypeError: ``query`` is not E4M3.
            ValueError: it has another shape, or more rows than a mailbox.
            Overrun: a peer has not read the last words in this place.
        """
        code = mailbox.query_bytes(query)
        want = (self.owner_heads, ROW)
        if code.ndim != 3 or code.shape[1:] != want or len(code) > self.cap:
            raise ValueError(
                f"query must be [B, {self.owner_heads}, {ROW}] with B at most {self.cap}, "
                f"got {list(code.shape)}"
            )
        words = as_words(code)
        heads = slice(self.rank * self.owner_heads, (self.rank + 1) * self.owner_heads)
        for peer in self.mailboxes:
            send(peer.query[self.parity, : len(words), heads], words, QUERY_SENTINEL)

    def decode(
        self,
        kv: NDArray[Any],
        rows: NDArray[Any],
        valid: NDArray[Any],
        *,
        batch: int,
        scale_log2: float,
        out_scale: float,
    ) -> None:
        """Attend to this rank's keys with all ranks' heads, and push each row to its owner.

        Args:
            kv: [N, 576] E4M3 cache rows of this rank.
            rows: [>= batch, width] int32 row ids.
            valid: [>= batch] int32 counts.
            batch: rows, at most the mailbox's.
            scale_log2: as ``decode``.
            out_scale: likewise.

        Raises:
            TypeError: an argument has the wrong dtype or type; nothing is changed.
            ValueError: an argument has the wrong shape or value; nothing is changed.
            NotArrived: a query word is missing; nothing is changed.
            Overrun: a slot of the last step but one was not read yet.
        """
        heads = self.ranks * self.owner_heads
        _check_integer("batch", batch, self.cap)
        # Before a word is taken, so that a call with better arguments still finds them all.
        absent = np.broadcast_to(np.uint8(0), (batch, heads, ROW))
        args = arguments.check(
            absent, kv, rows, valid, scale_log2, out_scale, self.schedule, self.machine
        )
        words = receive(self.own.query[self.parity, :batch, :heads], QUERY_SENTINEL)
        args = replace(args, query=words.view(np.uint8).reshape(batch, heads, ROW))
        for b in range(batch):
            merged = decode_row(args, b, self.schedule, self.machine)
            self._push(b, self.machine.round_out(merged.row), merged.lse2)

    def _push(self, b: int, row: NDArray[Any], lse2: NDArray[np.float32]) -> None:
        """One row's heads, [D * H, 512] and [D * H], to their owners."""
        payload = as_words(mailbox.payload_bits(row))
        sent, dropped = mailbox.is_sent(lse2), mailbox.is_dropped(lse2)
        for head, word in enumerate(mailbox.lse_words(lse2)):
            peer = self.mailboxes[head // self.owner_heads]
            slot = (self.parity, self.rank, b, head % self.owner_heads)
            if sent[head]:
                send(peer.payload[slot], payload[head], PAYLOAD_SENTINEL)
            peer.dropped[self.rank] += dropped[head]
            send(peer.lse[(*slot, None)], word, LSE_SENTINEL)

    def merge(self, batch: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Merge all ranks' partials of this rank's heads; ends the step.

        Returns:
            latent [batch, H, 512] BF16 and lse [batch, H] float32, natural log.

        Raises:
            TypeError: ``batch`` is no integer.
            ValueError: ``batch`` is more than the mailbox's rows, or negative.
            NotArrived: a word is missing; nothing is changed.
        """
        _check_integer("batch", batch, self.cap)
        lse = self.own.lse[self.parity, :, :batch]
        payload = self.own.payload[self.parity, :, :batch]
        if np.any(lse == LSE_SENTINEL):
            raise NotArrived("an LSE has not arrived")
        full = lse.view(np.float32) != EMPTY_LSE
        if np.any(payload[full] == PAYLOAD_SENTINEL):
            raise NotArrived("a payload has not arrived")
        values = np.zeros((*full.shape, LATENT // 2), np.uint32)
        values[full] = payload[full]
        payload[full] = PAYLOAD_SENTINEL
        lse2 = receive(lse, LSE_SENTINEL).view(np.float32)
        self.epoch += 1
        rows = mailbox.values_of(values)
        latent, natural_lse = owner_merge(rows, lse2, machine=self.machine)
        return latent, natural_lse


def dcp_step(
    query: Sequence[NDArray[Any]],
    kv: Sequence[NDArray[Any]],
    rows: Sequence[NDArray[Any]],
    valid: Sequence[NDArray[Any]],
    *,
    scale_log2: float,
    out_scale: float,
    schedule: Schedule = BASE,
    machine: Machine = SM90,
    order: Sequence[int] | None = None,
) -> DcpOutput:
    """One step of D ranks. All arguments but the scales have one entry a rank.

    Args:
        query: [B, H, 576] E4M3, the heads that the rank owns. B and H are the same on every rank.
        kv: [N, 576] E4M3, the rank's cache rows; N may differ.
        rows: [>= B, width] int32 ids of the rank's cache rows.
        valid: [>= B] int32, how many of a row's ids count.
        scale_log2: softmax scale x tensor scales x log2(e), rounded to float32.
        out_scale: the scale of V, likewise.
        schedule: order of the decode's roundings.
        machine: the arithmetic; a GPU's.
        order: the ranks in the order in which they run each stage; the result does not depend on
            it. 0, 1, ... if left out.

    Raises:
        TypeError: an argument has the wrong dtype or type; the message names it.
        ValueError: an argument has the wrong shape or length; the message names it.
    """
    inputs = (("query", query), ("kv", kv), ("rows", rows), ("valid", valid))
    for name, given in inputs:
        _check_sequence(name, given, "with one entry a rank")
    if order is not None:
        _check_sequence("order", order, "of integers")
    ranks = len(query)
    for name, given in inputs:
        if len(given) != ranks or ranks == 0:
            raise ValueError(
                f"{name} must have one entry a rank, {ranks} (query's), of 1 or more, "
                f"got {len(given)}"
            )
    turns = list(range(ranks)) if order is None else list(order)
    if sorted(turns) != list(range(ranks)):
        raise ValueError(f"order must be a permutation of 0 to {ranks - 1}, got {turns}")
    shapes = {np.shape(q) for q in query}
    if len(shapes) != 1 or any(len(shape) != 3 or shape[2] != ROW for shape in shapes):
        raise ValueError(
            f"query must be [B, H, {ROW}], the same on every rank, "
            f"got {[list(np.shape(q)) for q in query]}"
        )
    batch, owner_heads, _ = np.shape(query[0])
    mailboxes = [Mailbox.empty(owner_heads, ranks, max(batch, 1)) for _ in range(ranks)]
    group = [Rank(r, mailboxes, schedule=schedule, machine=machine) for r in range(ranks)]
    scales = {"scale_log2": scale_log2, "out_scale": out_scale}
    for r in turns:
        group[r].exchange(query[r])
    for r in turns:
        group[r].decode(kv[r], rows[r], valid[r], batch=batch, **scales)
    results = {r: group[r].merge(batch) for r in turns}
    latent, lse = (np.stack([results[r][k] for r in range(ranks)]) for k in range(2))
    return DcpOutput(latent, lse, np.stack([m.dropped for m in mailboxes]))


def _check_sequence(name: str, value: object, of: str) -> None:
    if not isinstance(value, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a sequence {of}, got {type(value).__name__}")


def _check_integer(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer from 0 to {most}, got {value!r}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most}, got {value}")
