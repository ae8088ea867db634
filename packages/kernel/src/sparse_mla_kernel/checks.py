"""Errors for arguments that the kernel can't take, before anything is compiled or launched."""

from __future__ import annotations

import numbers

import torch

from sparse_mla_kernel.registry import ARCHITECTURES, KERNELS
from sparse_mla_kernel.schedule import ROW_COLUMNS, TILE_HEADS, Schedule

#: The owner merge keeps three words of every rank in registers.
MAX_RANKS = 32
BYTES = (torch.uint8, torch.float8_e4m3fn)
#: Row ids are int32.
MAX_CACHE_ROWS = 2**31 - 1
#: Elements that the query, the row lists or the latents may have.
MAX_ELEMENTS = 2**31 - 1
_FLOAT32_MAX = torch.finfo(torch.float32).max


def check_geometry(batch: int, heads: int, padded: int, width: int) -> None:
    """Raise if the kernel can't have these static sizes.

    Raises:
        TypeError: A size is no int.
        ValueError: A size is out of range.
    """
    for name, value in (("batch", batch), ("heads", heads), ("padded", padded), ("width", width)):
        check_int(name, value)
    if not 1 <= batch <= 65535:
        raise ValueError(f"batch is {batch}; it may be 1 to 65535 (the grid's second dimension)")
    if heads < TILE_HEADS or heads % TILE_HEADS:
        raise ValueError(f"heads is {heads}; it may be a positive multiple of {TILE_HEADS}")
    if heads > padded:
        raise ValueError(f"heads is {heads}; it may be at most padded, which is {padded}")
    if width < 1:
        raise ValueError(f"width is {width}; it may be 1 or more")
    # The kernels' offsets into these are 32-bit; those into kv are not.
    for what, size in (
        (f"width is {width}; batch x width", batch * width),
        (f"padded is {padded}; batch x padded x {ROW_COLUMNS}", batch * padded * ROW_COLUMNS),
    ):
        if size > MAX_ELEMENTS:
            raise ValueError(
                f"batch is {batch}, {what} is {size}; it may be at most {MAX_ELEMENTS} (2^31 - 1)"
            )


def check_cap(cap: int, batch: int) -> None:
    """Raise if a q mailbox of ``cap`` rows can't hold ``batch`` rows.

    Raises:
        TypeError: ``cap`` is no int.
        ValueError: ``cap`` is less than ``batch``.
    """
    check_int("cap", cap)
    if cap < batch:
        raise ValueError(f"cap is {cap}; it may be batch or more, and batch is {batch}")


def check_push(push: object, heads: int, cap: int) -> None:
    """Raise unless ``push`` is ``(owner heads, ranks, cap)`` of a mailbox for ``heads`` heads.

    Raises:
        TypeError: ``push`` is no tuple of three ints.
        ValueError: A number is out of range, or doesn't agree with ``heads`` or ``cap``.
    """
    if not isinstance(push, tuple) or len(push) != 3:
        raise TypeError(f"push is {push!r}; it may be None or (owner heads, ranks, cap)")
    for name, value in zip(("owner heads", "ranks", "cap"), push, strict=True):
        check_int(f"push's {name}", value)
    owner_heads, ranks, rows = push
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"push's ranks is {ranks}; it may be 1 to {MAX_RANKS}")
    if owner_heads * ranks != heads:
        raise ValueError(
            f"push is {push}, {owner_heads * ranks} heads in all; heads may be that, and is {heads}"
        )
    if rows != cap:
        raise ValueError(f"push's cap is {rows}; it may be the q mailbox's, which is {cap}")


def check_schedule(schedule: object, kernel: str | None = None, mode: str | None = None) -> None:
    """Raise unless ``schedule`` is this package's, and of a kernel that is asked for.

    Args:
        schedule: What was passed.
        kernel: The name of the kernel that must run it; any if left out.
        mode: The mode that its kernel must have; any if left out.

    Raises:
        TypeError: It is something else, also another package's class of the same name.
        ValueError: Another kernel runs it, or its kernel does not have the mode.
    """
    if not isinstance(schedule, Schedule):
        kind = type(schedule)
        raise TypeError(
            "schedule must be a sparse_mla_kernel.Schedule, "
            f"got a {kind.__module__}.{kind.__qualname__}"
        )
    if kernel is not None and schedule.kernel != kernel:
        raise ValueError(f"schedule.kernel must be {kernel!r} here, got {schedule.kernel!r}")
    if mode is not None and mode not in schedule.entry.modes:
        able = " or ".join(repr(name) for name, k in KERNELS.items() if mode in k.modes)
        raise ValueError(f"schedule.kernel must be {able} in {mode} mode, got {schedule.kernel!r}")


def check_arch(arch: object) -> None:
    """Raise a ``ValueError`` unless the kernel compiles for ``arch``."""
    if arch not in ARCHITECTURES.values():
        raise ValueError(f"arch is {arch!r}; it may be {', '.join(ARCHITECTURES.values())}")


def check_int(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` is an int (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it may be an int")


def check_scale(name: str, value: object) -> float:
    """A finite number as a float.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: It is NaN, infinite, or beyond the float32 range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}; it may be a float")
    number = float(value)
    if not abs(number) <= _FLOAT32_MAX:
        raise ValueError(f"{name} is {value}; it may be any finite float32")
    return number


def as_scale(value: object) -> float:
    """:func:`check_scale` for a hot path: quick for a float, and the error has no name."""
    if type(value) is float and -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        return value
    return check_scale("a scale", value)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    """An E4M3 tensor as its bytes.

    Raises:
        TypeError: It is none, or of another dtype.
    """
    if tensor is None:
        raise TypeError("None; it may be a torch.Tensor")
    dtype = tensor.dtype
    if dtype is torch.uint8:
        return tensor
    if dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8)
    raise TypeError(f"{dtype}; it may be {BYTES[0]} or {BYTES[1]}")


def check_unseen(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    batch: int,
    device: torch.device,
) -> None:
    """Raise a ``ValueError`` for what a compiled launcher doesn't see; names no argument.

    A launcher checks ranks, sizes, strides, alignment, dtypes and that all tensors are on one
    device. It takes any length where the kernel has no static one, and an integer of either sign.
    """
    if not (
        query.device == device
        and rows.dtype is valid.dtype is torch.int32
        and rows.shape[0] >= batch
        and valid.shape[0] >= batch
        and kv.shape[0] <= MAX_CACHE_ROWS
    ):
        raise ValueError("an argument is not what the kernel was compiled for")


def check_cache_rows(kv: torch.Tensor) -> None:
    """Raise a ``ValueError`` if ``kv`` has more rows than an id can name."""
    if kv.shape[0] > MAX_CACHE_ROWS:
        raise ValueError(f"kv has {kv.shape[0]} rows; it may have up to 2^31 - 1 (ids are int32)")


def check_dimensions(query: object, rows: object) -> None:
    """``query`` is a tensor of 3 dimensions, ``rows`` of 2: sizes can be taken from them."""
    for name, tensor, dims in (("query", query, 3), ("rows", rows, 2)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it may be a torch.Tensor")
        if tensor.dim() != dims:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; it may have {dims} dimensions"
            )


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
        tensor: What was passed.
        dtypes: Types that it may have.
        shape: A size a dimension: a number, ``">= 5"``, or a name for any size.
        device: Where it must be.
        align_bytes: What its address must be a multiple of.

    Raises:
        TypeError: No tensor, or another dtype.
        ValueError: Another shape, device or alignment, or not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it may be a torch.Tensor")
    if tensor.dtype not in dtypes:
        may = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} is {tensor.dtype}; it may be {may}")
    if tensor.dim() != len(shape) or not all(map(_fits, tensor.shape, shape)):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it may be {_text(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it may be on {device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}; it may be contiguous, "
            f"shape {_text(shape)}"
        )
    if tensor.data_ptr() % align_bytes:
        raise ValueError(
            f"{name} starts at {tensor.data_ptr():#x}; it may start at a multiple of {align_bytes}"
        )


def _text(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _fits(size: int, want: int | str) -> bool:
    if isinstance(want, int):
        return size == want
    return size >= int(want.removeprefix(">=")) if want.startswith(">=") else True


def architecture_of(device: torch.device) -> str:
    """The compiler's name of a CUDA device's architecture.

    Raises:
        ValueError: ``device`` is no CUDA device, or of an architecture without thread block
            clusters and bulk copies.
        RuntimeError: There is no usable CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"device is {device}; it may be a CUDA device")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {device}; torch finds no usable CUDA device here")
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        may = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise ValueError(
            f"device is {device}, compute capability {capability[0]}.{capability[1]}; "
            f"it may have {may}"
        )
    return ARCHITECTURES[capability]


def resolve_device(device: torch.device | str | int) -> torch.device:
    """A device with its index: ``"cuda"`` is the current one.

    Raises:
        TypeError: ``device`` is of another type.
        ValueError: It names no device.
    """
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(
            f"device is a {type(device).__name__}; it may be a torch.device, str or int"
        )
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}; it may be a CUDA device, such as 'cuda:0'"
        ) from None
    if resolved.type == "cuda" and resolved.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
