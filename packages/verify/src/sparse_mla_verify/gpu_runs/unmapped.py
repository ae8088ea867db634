"""Device memory with nothing around it: a mapped range amid unmapped addresses.

CUDA's virtual memory management reserves addresses without memory behind them. No other memory can
lie at reserved addresses, so that a kernel that reads there faults.
"""

import ctypes
from typing import Any

import torch
from cuda.bindings import driver

SUCCESS = "CUDA_SUCCESS"


class MappedRange:
    """`size` bytes of device memory between `before` and `after` bytes of nothing.

    All three are multiples of the device's granularity, 2 MiB on an H200. The memory is there until
    the process ends.

    Raises:
        RuntimeError: The driver refuses.
    """

    def __init__(self, size: int, before: int, after: int, device: int = 0) -> None:
        torch.zeros(1, device=f"cuda:{device}")  # makes the device's context current
        self.size, self.before, self.after, self.device = size, before, after, device
        self._location = driver.CUmemLocation()
        self._location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device
        memory = driver.CUmemAllocationProp()
        memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        memory.location = self._location
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = int(_value(driver.cuMemGetAllocationGranularity(memory, least)))
        if size % grain or before % grain or after % grain:
            raise RuntimeError(
                f"before, size and after must be multiples of {grain} bytes, "
                f"got {before}, {size}, {after}"
            )
        start = int(_value(driver.cuMemAddressReserve(before + size + after, grain, 0, 0)))
        self.address = start + before
        handle = _value(driver.cuMemCreate(size, memory, 0))
        _value(driver.cuMemMap(self.address, size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _value(driver.cuMemSetAccess(self.address, size, [access], 1))

    def tensor(self, rows: int, columns: int, offset: int = 0) -> torch.Tensor:
        """`[rows, columns]` bytes, from `offset` bytes after the start of the memory or before it.

        The tensor may reach beyond the mapped memory.
        """
        return tensor_at(self.address + offset, rows, columns, self.device)

    def access(self, offset: int) -> str:
        """What the driver says of the device's access at an offset: its flags, or its error."""
        status, flags = driver.cuMemGetAccess(self._location, self.address + offset)
        name: str = status.name
        return f"access {int(flags)}" if name == SUCCESS else name


def finished() -> str:
    """Wait for all work of the current context: `CUDA_SUCCESS`, or the error that ended it."""
    (status,) = driver.cuCtxSynchronize()
    name: str = status.name
    return name


def _value(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver gave. Raises RuntimeError with the error's name if it failed."""
    status, *values = answer
    if status.name != SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


# DLPack, by which a tensor is made of an address alone: PyTorch's other ways look the address up.


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CPU, _CUDA, _UNSIGNED = 1, 2, 1  # of dlpack.h
_kept: list[Any] = []  # what tensors point to, until the process ends


def tensor_at(address: int, rows: int, columns: int, device: int | None = 0) -> torch.Tensor:
    """`[rows, columns]` bytes at an address, of a CUDA device or, for None, of the host."""
    sizes = ctypes.c_int64 * 2
    shape, strides = sizes(rows, columns), sizes(columns, 1)
    where = _Device(_CPU, 0) if device is None else _Device(_CUDA, device)
    managed = _Managed(
        _Tensor(address, where, 2, _Type(_UNSIGNED, 8, 1), shape, strides, 0), None, None
    )
    _kept.append((managed, shape, strides))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))
