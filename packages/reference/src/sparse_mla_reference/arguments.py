"""The arguments of ``decode``, checked once."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats.e4m3 import as_bytes
from sparse_mla_reference.machine import Gpu, Machine
from sparse_mla_reference.schedule import ROW, Schedule


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of ``decode``.

    ``query`` [B, H, 576] and ``kv`` [N, 576] are E4M3 bytes, the scales float32.
    """

    query: NDArray[np.uint8]
    kv: NDArray[np.uint8]
    rows: NDArray[np.int32]
    valid: NDArray[np.int32]
    scale_log2: np.float32
    out_scale: np.float32

    def row_ids(self, b: int) -> NDArray[np.int64]:
        """The ids of row ``b`` that count, int64; ``valid`` clamped to [0, width]."""
        count = min(max(int(self.valid[b]), 0), self.rows.shape[1])
        return self.rows[b, :count].astype(np.int64)


def check(
    query: NDArray[Any],
    kv: NDArray[Any],
    rows: NDArray[Any],
    valid: NDArray[Any],
    scale_log2: float,
    out_scale: float,
    schedule: Schedule,
    machine: Machine,
) -> Arguments:
    """Check the arguments of ``decode``; nothing is copied or changed.

    Raises:
        TypeError: a wrong dtype or type; the message names the argument.
        ValueError: a wrong shape, or a schedule that the machine can't run; the message names the
            argument or the field.
    """
    query, kv = as_bytes("query", query), as_bytes("kv", kv)
    _check_shape("query", query, ("B", "H", ROW))
    _check_shape("kv", kv, ("N", ROW))
    batch = query.shape[0]
    rows, valid = _int32("rows", rows), _int32("valid", valid)
    _check_shape("rows", rows, (f">= {batch}", "width"))
    _check_shape("valid", valid, (f">= {batch}",))
    for name, x in (("rows", rows), ("valid", valid)):
        if len(x) < batch:
            raise ValueError(f"{name} must have at least {batch} rows (query's), got {len(x)}")
    check_plan(schedule, machine)
    scales = [_scalar(n, x) for n, x in (("scale_log2", scale_log2), ("out_scale", out_scale))]
    return Arguments(query, kv, rows, valid, *scales)


def check_plan(schedule: Schedule, machine: Machine) -> None:
    """Check the kinds of ``schedule`` and ``machine``, and that they go together.

    Raises:
        TypeError: one is of another kind; the message names it.
        ValueError: ``schedule.pv_keys`` is no multiple of the step of the GPU's instruction.
    """
    check_kind("schedule", schedule, Schedule, "such as BASE")
    check_kind("machine", machine, Machine, "such as SM90")
    if not isinstance(machine, Gpu):  # what rounds nothing has no step
        return
    step = machine.multiplying(schedule.mma).step
    if schedule.pv_keys % step:
        raise ValueError(
            f"schedule.pv_keys must be a multiple of {step}, the step of {machine.name}'s "
            f"instruction with mma={schedule.mma!r}, got {schedule.pv_keys}"
        )


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Check that an argument is a ``kind`` of this package.

    Raises:
        TypeError: it is not; the message names it, its type, and an ``example`` of the right one.
    """
    if not isinstance(value, kind):
        given = type(value)
        where = "" if given.__module__ == "builtins" else f"{given.__module__}."
        raise TypeError(
            f"{name} must be a {kind.__name__} of sparse_mla_reference, {example}, "
            f"got {where}{given.__qualname__}"
        )


def _check_shape(name: str, x: NDArray[Any], shape: tuple[int | str, ...]) -> None:
    fits = x.ndim == len(shape) and all(
        not isinstance(want, int) or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {list(x.shape)}")


def _int32(name: str, x: NDArray[Any]) -> NDArray[np.int32]:
    x = np.asarray(x)
    if x.dtype != np.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    return x


def _scalar(name: str, x: float) -> np.float32:
    if isinstance(x, bool | np.bool_) or not isinstance(x, Real | np.floating | np.integer):
        raise TypeError(f"{name} must be a real number, got {type(x).__name__}")
    with np.errstate(over="ignore"):
        return np.float32(x)
