"""Checks of arguments: a wrong argument is an error before anything is compiled or launched.

Every error has one form: ``<argument> must be <what>, got <what it was>``. A ``TypeError`` says
that an argument is of the wrong kind (type or dtype), a ``ValueError`` that its value is wrong.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from math import prod

import torch

from sparse_mla_kernel.schedule import ROW_COLUMNS, TILE_HEADS, Schedule
from sparse_mla_kernel.schedule.registry import ARCHITECTURES, KERNELS

#: The largest batch: rows are the second dimension of the grid, which CUDA limits to this.
MAX_BATCH = 65535
#: The largest group of ranks: the owner merge keeps three words of each rank in registers.
MAX_RANKS = 32
#: The dtypes that hold E4M3 numbers.
BYTES = (torch.uint8, torch.float8_e4m3fn)
#: The largest cache: a row id is an int32.
MAX_CACHE_ROWS = 2**31 - 1
#: The most elements of the query, the row lists or the latents: their offsets are 32-bit. (The
#: offsets into ``kv`` are 64-bit.)
MAX_ELEMENTS = 2**31 - 1
_FLOAT32_MAX = torch.finfo(torch.float32).max


def check_geometry(batch: int, heads: int, padded: int, width: int) -> None:
    """Raise unless a kernel can have these static sizes.

    Args:
        batch: Decode rows, 1 to 65535.
        heads: Query heads that are used: a positive multiple of 16, at most ``padded``.
        padded: Query heads that a row of the query has.
        width: Row ids that a row's list holds, 1 or more.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is out of range, or two sizes make a tensor of 2^31 elements or more.
    """
    for name, value in (("batch", batch), ("heads", heads), ("padded", padded), ("width", width)):
        check_int(name, value)
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch must be from 1 to {MAX_BATCH}, got {batch}")
    if heads < TILE_HEADS or heads % TILE_HEADS:
        raise ValueError(f"heads must be a positive multiple of {TILE_HEADS}, got {heads}")
    if heads > padded:
        raise ValueError(f"heads must be at most padded, {padded}, got {heads}")
    if width < 1:
        raise ValueError(f"width must be 1 or more, got {width}")
    for product, factors in (
        ("batch x width", (batch, width)),
        (f"batch x padded x {ROW_COLUMNS}", (batch, padded, ROW_COLUMNS)),
    ):
        if prod(factors) > MAX_ELEMENTS:
            raise ValueError(
                f"{product} must be at most {MAX_ELEMENTS} (2^31 - 1), "
                f"got {' x '.join(map(str, factors))} = {prod(factors)}"
            )


def check_cap(cap: int, batch: int) -> None:
    """Raise unless a q mailbox of ``cap`` rows holds ``batch`` rows.

    Raises:
        TypeError: ``cap`` is not an int.
        ValueError: ``cap`` is less than ``batch``.
    """
    check_int("cap", cap)
    if cap < batch:
        raise ValueError(f"cap must be at least batch, {batch}, got {cap}")


def check_push(push: object, heads: int, cap: int) -> None:
    """Raise unless ``push`` is ``(owner_heads, ranks, cap)`` of a mailbox for ``heads`` heads.

    Raises:
        TypeError: ``push`` is not a tuple of three ints.
        ValueError: ``ranks`` is out of range, ``owner_heads x ranks`` is not ``heads``, or the
            mailbox's ``cap`` is not ``cap``.
    """
    if not isinstance(push, tuple) or len(push) != 3:
        raise TypeError(f"push must be None or (owner_heads, ranks, cap), got {push!r}")
    for name, value in zip(("owner_heads", "ranks", "cap"), push, strict=True):
        check_int(f"push's {name}", value)
    owner_heads, ranks, rows = push
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"push's ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    if owner_heads * ranks != heads:
        raise ValueError(
            f"push must give owner_heads x ranks = heads, {heads}, got {owner_heads * ranks}"
        )
    if rows != cap:
        raise ValueError(f"push's cap must be the cap of the q mailbox, {cap}, got {rows}")


def check_schedule(schedule: object, kernel: str | None = None, mode: str | None = None) -> None:
    """Raise unless ``schedule`` is this package's and its kernel is one that is asked for.

    Args:
        schedule: The argument.
        kernel: The name of the kernel that must run the schedule; any kernel if left out.
        mode: The mode that the schedule's kernel must have; any mode if left out.

    Raises:
        TypeError: ``schedule`` is of another class, also of another package's class of this name.
        ValueError: Another kernel runs the schedule, or its kernel does not have the mode.
    """
    if not isinstance(schedule, Schedule):
        kind = type(schedule)
        raise TypeError(
            "schedule must be a sparse_mla_kernel.Schedule, "
            f"got {kind.__module__}.{kind.__qualname__}"
        )
    if kernel is not None and schedule.kernel != kernel:
        raise ValueError(f"schedule.kernel must be {kernel!r} here, got {schedule.kernel!r}")
    if mode is not None and mode not in schedule.entry.modes:
        able = one_of(repr(name) for name, entry in KERNELS.items() if mode in entry.modes)
        raise ValueError(f"schedule.kernel must be {able} in {mode} mode, got {schedule.kernel!r}")


def check_arch(arch: object) -> None:
    """Raise a ``ValueError`` unless the kernel compiles for ``arch``."""
    names = list(ARCHITECTURES.values())
    if arch not in names:
        raise ValueError(f"arch must be {one_of(names)}, got {arch!r}")


def check_int(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` is an int; a bool does not count as one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({kind_of(value)})")


def check_scale(name: str, value: object) -> float:
    """A finite number as a float.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is NaN, infinite, or beyond the float32 range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {kind_of(value)}")
    number = float(value)
    if not abs(number) <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be finite as a float32, got {value}")
    return number


def as_scale(value: object) -> float:
    """:func:`check_scale` for a launch: quick for a float, and its errors say ``value``."""
    if type(value) is float and -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        return value
    return check_scale("value", value)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    """An E4M3 tensor as its bytes, a ``uint8`` tensor over the same memory.

    Raises:
        TypeError: ``tensor`` is None, or of another dtype.
    """
    if tensor is None:
        raise TypeError("tensor must be a torch.Tensor, got None")
    dtype = tensor.dtype
    if dtype is torch.uint8:
        return tensor
    if dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8)
    raise TypeError(f"tensor must be {one_of(BYTES)}, got {dtype}")


def check_unseen(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    batch: int,
    device: torch.device,
) -> None:
    """Raise a ``ValueError`` for what a compiled launcher does not see.

    A launcher checks the number of dimensions, static sizes, strides, alignment and dtypes of its
    arguments, and that all of them are on one device. It takes any length where the kernel has no
    static one, unsigned integers for signed ones, and any device. This check is part of each
    launch, so its error does not say which argument is wrong: :func:`check_tensor` does.
    """
    if not (
        query.device == device
        and rows.dtype is valid.dtype is torch.int32
        and rows.shape[0] >= batch
        and valid.shape[0] >= batch
        and kv.shape[0] <= MAX_CACHE_ROWS
    ):
        raise ValueError(
            "query, kv, rows and valid must be what the kernel was compiled for, got others"
        )


def check_cache_rows(kv: torch.Tensor) -> None:
    """Raise a ``ValueError`` if ``kv`` has more rows than an int32 id can name."""
    if kv.shape[0] > MAX_CACHE_ROWS:
        raise ValueError(f"kv must have at most {MAX_CACHE_ROWS} rows (2^31 - 1), got {len(kv)}")


def check_dimensions(query: object, rows: object) -> None:
    """Raise unless sizes can be read off ``query`` (3 dimensions) and ``rows`` (2 dimensions).

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: An argument has another number of dimensions.
    """
    for name, tensor, dims in (("query", query, 3), ("rows", rows, 2)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {kind_of(tensor)}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {list(tensor.shape)}")


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | str, ...],
    device: torch.device,
    align_bytes: int,
) -> None:
    """Raise unless ``tensor`` is a contiguous tensor of this kind.

    Args:
        name: The argument's name, for the error.
        tensor: The argument.
        dtypes: The dtypes that the tensor may have.
        shape: The size of each dimension: a number, ``">= 5"`` for 5 or more, or a name such as
            ``"N"`` for any size.
        device: The device that the tensor must be on.
        align_bytes: The tensor's address must be a multiple of this.

    Raises:
        TypeError: ``tensor`` is not a tensor, or has another dtype.
        ValueError: ``tensor`` has another shape, device or alignment, or is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {kind_of(tensor)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {one_of(dtypes)}, got {tensor.dtype}")
    if tensor.dim() != len(shape) or not all(map(_fits, tensor.shape, shape)):
        raise ValueError(f"{name} must have shape {_text(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with shape {_text(shape)}, "
            f"got strides {list(tensor.stride())}"
        )
    if tensor.data_ptr() % align_bytes:
        raise ValueError(
            f"{name} must start at a multiple of {align_bytes} bytes, "
            f"got address {tensor.data_ptr():#x}"
        )


def one_of(choices: Iterable[object]) -> str:
    """Choices as text: ``"a"``, ``"a or b"``, ``"a, b or c"``."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def kind_of(value: object) -> str:
    """What an error calls the kind of ``value``: ``"None"``, or the name of its type."""
    return "None" if value is None else type(value).__name__


def _text(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _fits(size: int, want: int | str) -> bool:
    if isinstance(want, int):
        return size == want
    return size >= int(want.removeprefix(">=")) if want.startswith(">=") else True


def architecture_of(device: torch.device) -> str:
    """The compiler's name of a CUDA device's architecture, such as ``"sm_90a"``.

    Raises:
        ValueError: ``device`` is not a CUDA device, or is of an architecture that the kernel does
            not compile for: one without thread-block clusters and bulk copies.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    check_cuda(device)
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        known = one_of(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise ValueError(
            f"device must have compute capability {known}, "
            f"got {device} with {capability[0]}.{capability[1]}"
        )
    return ARCHITECTURES[capability]


def check_cuda(device: torch.device) -> None:
    """Raise unless ``device`` is a CUDA device, on a computer that has one.

    Raises:
        ValueError: ``device`` is of another type.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device must be a CUDA device that PyTorch can use, got {device}, "
            "and PyTorch finds none on this computer"
        )


def resolve_device(device: torch.device | str | int) -> torch.device:
    """A device with its index: ``"cuda"`` is the current CUDA device, and 1 is ``"cuda:1"``.

    Raises:
        TypeError: ``device`` is of another type.
        ValueError: ``device`` is a text that names no device.
    """
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(f"device must be a torch.device, str or int, got {kind_of(device)}")
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be a device such as 'cuda:0', got {device!r}") from None
    if resolved.type == "cuda" and resolved.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
