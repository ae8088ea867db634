"""The public device helpers, on the GPU."""

import numpy as np
import pytest
import torch
from cutlass import Uint8, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from sparse_mla_kernel import store_fp8_pair_shared, transpose4
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@cute.kernel
def _transpose(words: cute.Tensor, out: cute.Tensor) -> None:
    row = transpose4(words[0], words[1], words[2], words[3])
    out[0], out[1], out[2], out[3] = row


@cute.jit
def _launch_transpose(words: cute.Tensor, out: cute.Tensor) -> None:
    _transpose(words, out).launch(grid=(1, 1, 1), block=(1, 1, 1))


@cute.kernel
def _store_pair(values: cute.Tensor, out: cute.Tensor) -> None:
    t, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator().allocate_array(Uint8, 64, byte_alignment=16).toint()
    store_fp8_pair_shared(smem + 2 * t, values[2 * t], values[2 * t + 1])
    cute.arch.sync_threads()
    if t % 2 == 0:
        out[t // 2] = load_shared_b32(smem + 2 * t)


@cute.jit
def _launch_store_pair(values: cute.Tensor, out: cute.Tensor) -> None:
    _store_pair(values, out).launch(grid=(1, 1, 1), block=(16, 1, 1))


def test_transpose4() -> None:
    matrix = torch.arange(16, dtype=torch.uint8, device="cuda").view(4, 4)
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    words = from_dlpack(matrix.view(torch.int32).view(4), assumed_align=4)
    _launch_transpose(words, from_dlpack(out, assumed_align=4))
    assert torch.equal(out.view(torch.uint8).view(4, 4), matrix.T)


def test_store_fp8_pair_shared() -> None:
    """First number, lower address; nearest even, saturating, NaN of either sign to 0x7F."""
    nan, inf = float("nan"), float("inf")
    values = [1.0, -1.0, 1.0625, 1.1875, 448, 464, 1e9, -1e9]
    values += [inf, -inf, nan, -nan, 0.0, -0.0, 2.0**-10, 3 * 2.0**-11]
    want = [0x38, 0xB8, 0x38, 0x3A, 0x7E, 0x7E, 0x7E, 0xFE]
    want += [0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80, 0x00, 0x01]
    source = torch.tensor(values + [0.0] * 16, device="cuda")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    _launch_store_pair(from_dlpack(source), from_dlpack(out, assumed_align=4))
    got = out.cpu().numpy().view(np.uint8)
    assert [hex(byte) for byte in got[:16]] == [hex(byte) for byte in want]
    assert not got[16:].any()
