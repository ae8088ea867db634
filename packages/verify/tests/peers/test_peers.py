import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from sparse_mla_kernel import BASE, Schedule
from sparse_mla_reference import IDEAL
from sparse_mla_reference import decode as reference_decode
from sparse_mla_verify.peers import flashmla, floor, ours, pytorch
from sparse_mla_verify.peers.flashmla import FlashMLA
from sparse_mla_verify.peers.ours import Sparse, parse_schedule
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import PyTorch
from sparse_mla_verify.peers.workload import Pool, padded_ids, workload

WIDTH = 48


def relative(latent, work, k):
    inputs = (work.query[k], work.pool.kv, work.ids[k], work.valid)
    expected, _ = pytorch.decode(*inputs, scale_log2=work.scale_log2, out_scale=work.out_scale)
    return float(torch.linalg.norm(latent.double() - expected) / torch.linalg.norm(expected))


# PyTorch


def test_pytorch_in_float64_is_the_exact_decode(pool):
    generator = torch.Generator().manual_seed(3)
    work = workload(pool, Point(5, 16, 40), WIDTH, sets=1)
    rows = work.rows[0].clone()
    rows[0, :5] = torch.tensor([-1, -(2**31), 1024, 2**31 - 1, 5], dtype=torch.int32)
    rows[1] = -1  # all masked
    valid = torch.tensor([40, 40, 0, 7, WIDTH + 9], dtype=torch.int32)
    rows[4] = torch.randperm(1024, generator=generator, dtype=torch.int32)[:WIDTH]
    latent, lse = pytorch.decode(
        work.query[0], pool.kv, rows, valid, scale_log2=0.06, out_scale=0.5
    )
    arrays = [x.numpy() for x in (work.query[0], pool.kv, rows, valid)]
    exact, exact_lse = reference_decode(*arrays, scale_log2=0.06, out_scale=0.5, machine=IDEAL)
    np.testing.assert_allclose(latent.numpy(), exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse.numpy(), exact_lse, rtol=1e-6)
    for empty in (1, 2):
        assert not latent[empty].any()
        assert bool((lse[empty] == -torch.inf).all())


@pytest.mark.parametrize("keys", [0, 1, 40])
def test_pytorch_as_a_peer_writes_each_set_its_result(pool, keys):
    work = workload(pool, Point(2, 16, keys), WIDTH, sets=3)
    prepared = PyTorch().prepare(work)
    assert prepared.latent is not None
    prepared.latent.fill_(torch.nan)
    for call in prepared.calls:
        call()
    assert len(prepared.calls) == 3
    for k in range(3):
        if keys:
            assert relative(prepared.latent[k], work, k) < 0.01
        else:
            assert not prepared.latent[k].any()


# FlashMLA


def dequantised(cache):
    """A reader of FlashMLA's format, from its documentation: `[N, 576]` float64."""
    tokens = cache.reshape(-1, 656)
    values = tokens[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = tokens[:, 512:528].contiguous().view(torch.float32).double()
    rope = tokens[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([values * scales.repeat_interleave(128, 1), rope], 1)


class Interface:
    """A stand-in that decodes what it is given, by FlashMLA's documentation, and keeps it."""

    def __init__(self):
        self.seen = []

    def get_mla_metadata(self):
        return object(), None

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        *,
        softmax_scale,
        is_fp8_kvcache,
        indices,
        out,
    ):
        batch, queries, heads, _ = q.shape
        assert (block_table, cache_seqlens, head_dim_v) == (None, None, 512)
        assert is_fp8_kvcache
        assert queries == 1
        assert heads in (64, 128)
        assert (q.dtype, indices.dtype, out.dtype) == (torch.bfloat16, torch.int32, torch.bfloat16)
        assert k_cache.shape[1:] == (64, 1, 656)
        assert indices.shape[:2] == (batch, 1)
        assert indices.shape[2] % 64 == 0
        assert out.shape == (batch, 1, heads, 512)
        assert all(t.is_contiguous() for t in (q, k_cache, indices, out))
        self.seen.append((tile_scheduler_metadata, indices))
        cache = dequantised(k_cache)
        for b in range(batch):
            ids = indices[b, 0]
            keys = cache[ids[ids >= 0].long()]
            p = (q[b, 0].double() @ keys.T * softmax_scale).softmax(-1)
            out[b, 0] = (p @ keys[:, :512]).to(torch.bfloat16)


@pytest.mark.parametrize(("heads", "padded"), [(16, 64), (64, 64), (96, 128), (128, 128)])
def test_flashmla_is_given_the_same_problem(pool, heads, padded):
    work = workload(pool, Point(2, heads, 40), WIDTH, sets=2)
    interface = Interface()
    prepared = FlashMLA(interface, "stand-in").prepare(work)
    assert prepared.latent is not None
    prepared.latent.fill_(torch.nan)
    for call in prepared.calls:
        call()
    assert prepared.latent.shape == (2, 2, heads, 512)
    for k in range(2):
        assert relative(prepared.latent[k], work, k) < 0.005
    assert prepared.notes == {
        "flashmla_heads": padded,
        "flashmla_width": 64,
    }
    (first, _), (second, _) = interface.seen
    assert first is second  # one metadata for all sets


def test_flashmla_gets_a_wide_list_with_marks_past_the_keys(pool):
    work = workload(pool, Point(2, 16, 40), WIDTH, sets=1).widened(WIDTH, 128)
    interface = Interface()
    prepared = FlashMLA(interface, "stand-in").prepare(work)
    assert prepared.latent is not None
    prepared.calls[0]()
    (_, indices) = interface.seen[0]
    assert indices.shape == (2, 1, 128)
    assert (indices[..., 40:] == -1).all()
    assert relative(prepared.latent[0], work, 0) < 0.005


def test_flashmla_cache_holds_the_same_values(pool):
    kv = pool.kv.clone()
    kv[0] = torch.arange(576) % 127  # every finite positive encoding, in both parts
    kv[1] = kv[0] | 0x80
    cache = flashmla.flashmla_cache(kv)
    assert cache.shape == (16, 64, 1, 656)
    assert torch.equal(dequantised(cache), kv.view(torch.float8_e4m3fn).double())


def test_flashmla_cache_is_made_once(pool):
    peer = FlashMLA(Interface(), "stand-in")
    assert peer.cache(pool) is peer.cache(pool)
    assert peer.cache(Pool("cpu", rows=64)).shape[0] == 1


def test_flashmla_limits(pool):
    with pytest.raises(ValueError, match="rows of kv must be a multiple of 64, got 100"):
        flashmla.flashmla_cache(pool.kv[:100])
    with pytest.raises(ValueError, match="heads must be at most 128 for FlashMLA, got 144"):
        flashmla.padded_heads(144)
    assert [flashmla.list_width(keys) for keys in (0, 1, 64, 65, 2048)] == [64, 64, 64, 128, 2048]


INTERFACE = """
import dataclasses
from typing import Optional
import vllm._flashmla_C

@dataclasses.dataclass
class Meta:
    ready: Optional[bool] = None
"""


def test_flashmla_interface_is_read_without_vllm(tmp_path, monkeypatch):
    path = tmp_path / "flash_mla_interface.py"
    path.write_text(INTERFACE)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert flashmla.load_interface(path).Meta().ready is None
    assert not {"vllm", "vllm._flashmla_C"} & set(sys.modules)
    kept = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", kept)
    flashmla.load_interface(path)
    assert sys.modules["vllm"] is kept


def test_flashmla_is_found_or_the_reason_is_said(tmp_path, monkeypatch):
    assert flashmla.find(tmp_path) == (
        None,
        "the folder lacks _flashmla_C.abi3.so and flash_mla_interface.py",
    )
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"no library")
    (tmp_path / "flash_mla_interface.py").write_text(INTERFACE)
    peer, why = flashmla.find(tmp_path)
    assert peer is None
    assert "_flashmla_C.abi3.so" in why
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    peer, source = flashmla.find(tmp_path)
    assert peer is not None
    assert peer.interface.Meta
    assert source == peer.source
    assert str(tmp_path) not in source
    monkeypatch.setitem(sys.modules, "vllm", None)
    peer, why = flashmla.find(None)
    assert peer is None
    assert why.startswith("vllm.third_party.flashmla")


# Ours


@pytest.fixture
def kernel(monkeypatch):
    """The kernel's two functions, replaced by ones that keep their arguments."""
    seen = SimpleNamespace(compiled=[], ran=[])

    def compile_sparse(*sizes, schedule):
        seen.compiled.append((sizes, schedule))
        artifact = SimpleNamespace(code_sha256=f"{sizes[:4]}")
        return SimpleNamespace(artifact=artifact, schedule=schedule)

    monkeypatch.setattr(ours, "compile_sparse", compile_sparse)
    monkeypatch.setattr(ours, "run_sparse", lambda *arguments: seen.ran.append(arguments))
    return seen


def test_ours_is_compiled_by_its_schedule(pool, kernel):
    work = workload(pool, Point(2, 32, 8), WIDTH, sets=2)
    base, split = Sparse("base", BASE), Sparse("split=8", Schedule(split=8))
    assert base.prepare(work).notes == {}
    split.prepare(work)
    sizes = (2, 32, 32, WIDTH, 2, torch.device("cpu"))
    assert kernel.compiled == [(sizes, BASE), (sizes, Schedule(split=8))]
    assert base.machine_code == {f"b2-h32-p32-w{WIDTH}-c2": f"(2, 32, 32, {WIDTH})"}


def test_ours_runs_each_set_into_outputs_of_its_own(pool, kernel):
    work = workload(pool, Point(2, 32, 8), WIDTH, sets=3)
    prepared = Sparse("base", BASE).prepare(work)
    assert prepared.latent is not None
    for call in prepared.calls:
        call()
    for k, arguments in enumerate(kernel.ran):
        _, query, kv, rows, valid, latent, lse, scale_log2, out_scale = arguments
        assert kv is pool.kv
        assert valid is work.valid
        assert torch.equal(query, work.query[k])
        assert torch.equal(rows, work.rows[k])
        assert latent.data_ptr() == prepared.latent[k].data_ptr()
        assert (latent.shape, latent.dtype) == ((2, 32, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 32), torch.float32)
        assert all(t.is_contiguous() for t in (query, rows, latent, lse))
        assert scale_log2 == pytest.approx(math.log2(math.e) / 24)
        assert out_scale == 1.0
    assert len({arguments[6].data_ptr() for arguments in kernel.ran}) == 3


def test_schedules_are_read_from_text():
    assert parse_schedule("") == BASE
    assert parse_schedule("split=8, chunk=32") == Schedule(split=8, chunk=32)
    with pytest.raises(ValueError, match=r"schedule's fields must be of split, .*, got 'splits'"):
        parse_schedule("splits=8")
    with pytest.raises(ValueError, match="schedule's split must be of int, got 'x'"):
        parse_schedule("split=x")
    with pytest.raises(ValueError, match=r"split must be one of 1, 2, 4, 8 .*, got 3"):
        parse_schedule("split=3")


# The floor


@pytest.mark.compiler
def test_the_floor_is_an_empty_kernel_of_the_same_threads():
    ptx = floor.compile_empty(4, "sm_90a").__ptx__  # type: ignore[attr-defined]
    lines = [line.strip() for line in ptx.splitlines()]
    body = lines[lines.index("{") + 1 : lines.index("}")]
    instructions = [line for line in body if line and not line.startswith("//")]
    assert instructions == ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "ret;"]
    assert f".reqntid {floor.THREADS}, 1, 1" in lines
    assert not list(Path.cwd().glob("*.ptx"))


def test_the_floor_has_the_kernels_grid(pool, monkeypatch):
    launched = []
    monkeypatch.setattr(floor, "architecture_of", lambda device: "sm_90a")
    monkeypatch.setattr(
        floor, "compile_empty", lambda split, arch: lambda *arguments: launched.append(arguments)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    work = workload(pool, Point(5, 96, 8), WIDTH, sets=2)
    prepared = floor.Floor("cpu", 4).prepare(work)
    for call in prepared.calls:
        call()
    assert prepared.latent is None
    assert [arguments[1:] for arguments in launched] == [(96 // 16 * 4, 5)] * 2


def test_ids_are_padded_with_masked_ones():
    ids = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
    assert padded_ids(ids, 5).tolist() == [[[0, 1, 2, -1, -1], [3, 4, 5, -1, -1]]]
