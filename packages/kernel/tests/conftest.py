"""What several rooms' tests share: a cache of their own, kernels compiled once, stand-ins."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import tvm_ffi

from sparse_mla_kernel import BASE, MailboxLayout
from sparse_mla_kernel.host import cache

if TYPE_CHECKING:
    from sparse_mla_kernel import DcpMailbox

#: The mailbox of 2 ranks with 8 heads each that the tests of push mode use.
BOX = MailboxLayout(padded=32, owner_heads=8, ranks=2, cap=3)


class Built(NamedTuple):
    """A small decode kernel, cross-compiled: its sizes, and what the cache is given of it."""

    sizes: Mapping[str, int]
    launcher: bytes
    ptx: str
    cubin: bytes

    def keep(self, inputs: Mapping[str, object]) -> bool:
        return cache.keep(inputs, self.launcher, self.ptx, self.cubin)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("SPARSE_MLA_CACHE", raising=False)
        yield


@pytest.fixture(scope="session")
def built(compiles: None) -> Built:
    from sparse_mla_kernel.host import build

    sizes = {"batch": 2, "heads": 16, "padded": 32, "width": 8}
    kernel = build.decode_kernel(**sizes, push=None, schedule=BASE)
    compiled = build.compile_entry(*build.decode_entry(kernel, 3), "sm_90a")
    launcher = build.object_file(compiled)
    return Built(sizes | {"cap": 3}, launcher, compiled.__ptx__, compiled.__cubin__)


@pytest.fixture
def launch(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The small kernel's launcher. Without a GPU it checks its arguments and goes no further."""
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    inputs = cache.describe("decode", "sm_90a", built.sizes)
    assert built.keep(inputs)
    found = cache.find(inputs)
    assert found is not None
    return found.launch


@pytest.fixture(scope="session")
def step_launcher(compiles: None) -> bytes:
    """The object file of a whole step's launcher: 2 rows, 2 ranks of 8 heads, 8 keys a row."""
    from sparse_mla_kernel.dcp.build import step_entries
    from sparse_mla_kernel.host import build

    entry = step_entries(2, 8, BOX, BASE)["step"]
    return build.object_file(build.compile_entry(*entry, "sm_90a"))


@pytest.fixture
def launch_step(step_launcher: bytes, tmp_path: Path) -> Callable[..., None]:
    """That step's launcher. Without a GPU it checks its arguments and goes no further."""
    (tmp_path / "step.o").write_bytes(step_launcher)
    return cache._load_object(tmp_path / "step.o")


@pytest.fixture
def stand_in() -> Callable[..., "DcpMailbox"]:
    """Makes mailboxes without memory, which have all that the host's checks look at.

    ``report`` is what a kernel has reported: a stage, a rank, a row and a head, or four zeros.
    """
    from sparse_mla_kernel import DcpMailbox
    from sparse_mla_kernel.mailbox.device import DeviceMailbox

    class StandIn(DcpMailbox):
        def __init__(
            self, box: MailboxLayout = BOX, report: tuple[int, ...] = (0, 0, 0, 0)
        ) -> None:
            self.box = box
            self.rank = 1
            self.device = torch.device("cpu")
            self.timeout_s = 0.25
            self.arguments = DeviceMailbox(0, 0, 0, 0, 0, 1)
            self._report_words = torch.tensor(report, dtype=torch.int32).numpy()

    return StandIn


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnGpu:
    """A tensor that DLPack passes on as one on a GPU: its type is read, its memory is not."""

    codes = {torch.uint8: 1, torch.int32: 0, torch.int64: 0, torch.bfloat16: 4}  # noqa: RUF012
    cuda = 2

    def __init__(self, tensor: torch.Tensor, device: int = 0, address: int = 1 << 20) -> None:
        shape, strides = tuple(tensor.shape), tensor.stride()
        self._sizes = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
        start = ctypes.addressof(self._sizes)
        code, bits = self.codes.get(tensor.dtype, 2), 8 * tensor.element_size()
        after = start + 8 * len(shape)
        self._tensor = _DLTensor(
            address, self.cuda, device, len(shape), code, bits, 1, start, after, 0, None, None
        )
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.cuda, self.device)

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


@pytest.fixture
def on_gpu() -> Iterator[Callable[..., object]]:
    """Makes tensors that claim to be on a GPU, of the type of a tensor on the CPU."""
    alive = []

    def convert(value: object, **where: int) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype is torch.float8_e4m3fn:
            value = value.view(torch.uint8)
        alive.append(OnGpu(value, **where))
        return tvm_ffi.from_dlpack(alive[-1])

    yield convert
    alive.clear()
