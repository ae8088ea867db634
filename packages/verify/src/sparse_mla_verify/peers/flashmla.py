"""FlashMLA's sparse FP8 decode, if it is installed.

FlashMLA makes other choices: BF16 queries and matrix products, a cache of 656 bytes for each token,
and two launches (split, combine). Before the clock starts it gets what it needs: its own cache with
the same E4M3 values and scales of 1, BF16 queries, the narrowest lists that it takes, and its
scheduling metadata.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparse_mla_verify.inputs.cases import COLUMNS, LATENT
from sparse_mla_verify.peers.implementation import Call, Prepared
from sparse_mla_verify.peers.workload import Pool, Workload, padded_ids

LIBRARY, INTERFACE = "_flashmla_C.abi3.so", "flash_mla_interface.py"
IN_VLLM = "vllm.third_party.flashmla.flash_mla_interface"

# Its FP8 cache ("V3.2" format), from the interface's documentation: 512 E4M3 values, a float32
# scale for each 128 of them, 64 BF16 values.
TOKEN_BYTES = LATENT + 4 * (LATENT // 128) + 2 * (COLUMNS - LATENT)
PAGE_ROWS = 64
HEAD_COUNTS = (64, 128)  # that it is built for
LIST_STEP = 64  # a list's width is a multiple of this on sm_90 (B_TOPK)


class FlashMLA:
    """`flash_mla_with_kvcache` with indices."""

    name = "flashmla"

    def __init__(self, interface: Any, source: str) -> None:
        self.interface = interface
        self.source = source
        self._cache: tuple[Pool, torch.Tensor] | None = None

    def prepare(self, work: Workload) -> Prepared:
        """One decode a set, all of one metadata: the sets have the same counts."""
        point, sets = work.point, work.sets
        heads = padded_heads(point.heads)
        width = list_width(work.peer_width)
        query = padded_query(work.query, heads)
        rows = padded_ids(work.ids, width)[:, :, None]
        # -1 masks what is left of a list: it takes no counts on sm_90, and reads all of a wide one.
        shape = (sets, point.rows, 1, heads, LATENT)
        out = torch.empty(shape, dtype=torch.bfloat16, device=work.pool.device)
        schedule, _ = self.interface.get_mla_metadata()
        cache = self.cache(work.pool)
        calls: list[Call] = [
            functools.partial(
                self.interface.flash_mla_with_kvcache,
                query[k],
                cache,
                None,
                None,
                LATENT,
                schedule,
                softmax_scale=work.scale_log2 * math.log(2),
                is_fp8_kvcache=True,
                indices=rows[k],
                out=out[k],
            )
            for k in range(sets)
        ]
        notes = {
            "flashmla_heads": heads,
            "flashmla_width": width,
        }
        return Prepared(calls, out[:, :, 0, : point.heads], notes)

    def cache(self, pool: Pool) -> torch.Tensor:
        """The pool in its format; made once."""
        if self._cache is None or self._cache[0] is not pool:
            self._cache = (pool, flashmla_cache(pool.kv))
        return self._cache[1]


def padded_heads(heads: int) -> int:
    """The least head count that it is built for.

    Raises ValueError if there is none.
    """
    for count in HEAD_COUNTS:
        if heads <= count:
            return count
    raise ValueError(f"heads must be at most {HEAD_COUNTS[-1]} for FlashMLA, got {heads}")


def list_width(keys: int) -> int:
    """The narrowest list that it takes for so many keys."""
    return max(LIST_STEP, math.ceil(keys / LIST_STEP) * LIST_STEP)


def padded_query(query: torch.Tensor, heads: int) -> torch.Tensor:
    """E4M3 queries `[sets, B, H, 576]` as BF16 `[sets, B, 1, heads, 576]`, then zeros."""
    shape = (*query.shape[:2], 1, heads, COLUMNS)
    padded = torch.zeros(shape, dtype=torch.bfloat16, device=query.device)
    padded[:, :, 0, : query.shape[2]] = query.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return padded


def flashmla_cache(kv: torch.Tensor) -> torch.Tensor:
    """A cache `[N, 576]` E4M3 in its format `[N / 64, 64, 1, 656]` bytes, with scales of 1.

    The values are the same: E4M3 is exact in BF16. Raises ValueError if N is no multiple of 64.
    """
    if len(kv) % PAGE_ROWS:
        raise ValueError(f"the rows of kv must be a multiple of {PAGE_ROWS}, got {len(kv)}")
    cache = torch.empty((len(kv), TOKEN_BYTES), dtype=torch.uint8, device=kv.device)
    scales_end = LATENT + 4 * (LATENT // 128)
    ones = torch.ones(LATENT // 128, dtype=torch.float32, device=kv.device).view(torch.uint8)
    cache[:, :LATENT] = kv[:, :LATENT]
    cache[:, LATENT:scales_end] = ones
    rope = kv[:, LATENT:].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
    cache[:, scales_end:] = rope.view(torch.uint8)
    return cache.view(-1, PAGE_ROWS, 1, TOKEN_BYTES)


def find(folder: Path | None) -> tuple[FlashMLA | None, str]:
    """FlashMLA from a folder, or else from an installed vLLM; and what was found or why nothing.

    The folder holds `_flashmla_C.abi3.so` and `flash_mla_interface.py`.
    """
    if folder is not None:
        missing = [name for name in (LIBRARY, INTERFACE) if not (folder / name).is_file()]
        if missing:
            return None, f"the folder lacks {' and '.join(missing)}"
        digest = hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest()
        source = f"{LIBRARY} {digest[:16]}"
        try:
            torch.ops.load_library(str(folder / LIBRARY))
            interface = load_interface(folder / INTERFACE)
        except (ImportError, OSError, RuntimeError) as error:
            return None, f"{source}: {_first_line(error)}"
        return FlashMLA(interface, source), source
    try:
        interface = importlib.import_module(IN_VLLM)
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"{IN_VLLM}: {_first_line(error)}"
    source = f"vllm {metadata.version('vllm')}"
    return FlashMLA(interface, source), source


def load_interface(path: Path) -> types.ModuleType:
    """The interface file as a module, with its library loaded already.

    It imports `vllm._flashmla_C` to have the operators registered; they are, so that an empty
    module does in its place while it is read.
    """
    spec = importlib.util.spec_from_file_location("flash_mla_interface", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _stand_ins("vllm", "vllm._flashmla_C"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _stand_ins(*names: str) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: types.ModuleType(name) for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
