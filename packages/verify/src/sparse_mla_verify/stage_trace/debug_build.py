"""A debug build of the kernels, which stores its stages: the patches, as data.

The patches go into a copy of the kernel's package, and so does a module that stores words. The
kernels that ship have none of it. The words lie behind the latent rows: the kernel finds them from
the address of `latent`, and the caller gives a `latent` with memory behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparse_mla_verify.processes.patched_kernel import Change, change_files, copied_package
from sparse_mla_verify.stage_trace.areas import STORED

#: The module that the copy has and the package has not.
MODULE = "stage_stores.py"

_HELPERS = '''"""Stores of stages, into the memory behind the latent rows."""

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.arch import inline_ptx

from sparse_mla_kernel.kernels.low_latency.softmax import of_own_head, own_head
from sparse_mla_verify.stage_trace.areas import COLUMNS, Areas

STORED = {stored!r}


class Stores:
    """Where a CTA stores: the place of its row, its heads and its keys in every area."""

    def __init__(self, mLatent, kernel, row, first_head, cta):
        self.areas = Areas(kernel.batch, kernel.heads, kernel.schedule.split, kernel.width)
        self.base = mLatent.iterator.toint() + 2 * COLUMNS * kernel.batch * kernel.padded
        self.row, self.first_head, self.cta = row, first_head, cta
        self.chunk = kernel.schedule.chunk


def put(stores, stage, head, cta, inner, value):
    """One word of a stage: of a head of the CTA's heads, a CTA, and a key or a column."""
    if stage not in STORED:
        return
    areas = stores.areas
    place = (stores.row * areas.heads + stores.first_head + head) * areas.split + cta
    word = areas.start(stage) + place * areas.inner(stage) + inner
    text = "st.global.f32 [{{$r0}}], {{$r1}};"
    if not isinstance(value, Float32):
        text = "st.global.b32 [{{$r0}}], {{$r1}};"
    inline_ptx(text, read_only_args=[stores.base + 4 * Int64(word), value])


@cute.jit
def load_byte(address: Int32) -> Uint32:
    return inline_ptx(
        "ld.shared.u8 {{$w0}}, [{{$r0}}];", write_only_types=[Uint32], read_only_args=[address]
    )


# ---- base: a warp has 8 keys, a lane the heads g and g + 8 of the keys 2q and 2q + 1 ------------


@cute.jit
def base_logits(stores, rLogit: cute.Tensor, c: Int32, count: Int32) -> None:
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for half in range_constexpr(2):
        for i in range_constexpr(2):
            key = 8 * warp + 2 * (lane % 4) + i
            if key < count:
                head, slot = lane // 4 + 8 * half, c * stores.chunk + key
                put(stores, "logits", head, stores.cta, slot, rLogit[2 * half + i])


@cute.jit
def base_p(stores, rP: cute.Tensor, address: Int32, half, c: Int32, count: Int32) -> None:
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for i in range_constexpr(2):
        key = 8 * warp + 2 * (lane % 4) + i
        if key < count:
            head, slot = lane // 4 + 8 * half, c * stores.chunk + key
            put(stores, "p", head, stores.cta, slot, rP[i])
            if const_expr("p_bytes" in STORED):
                put(stores, "p_bytes", head, stores.cta, slot, load_byte(address + i))


@cute.jit
def base_partial(stores, rAcc: cute.Tensor, rMax: cute.Tensor, rSum: cute.Tensor) -> None:
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for half in range_constexpr(2):
        head = lane // 4 + 8 * half
        for i in range_constexpr(2):
            for tile in range_constexpr(4):
                column = 32 * warp + 8 * (lane % 4) + 4 * i + tile
                put(stores, "partial", head, stores.cta, column, rAcc[2 * half + i, tile])
        if warp == 0:
            if lane % 4 == 0:
                put(stores, "max", head, stores.cta, 0, rMax[half])
                put(stores, "sum", head, stores.cta, 0, rSum[half])


# ---- low latency: a warp has the heads w, w + 8, .., a lane the keys 2 lane and 2 lane + 1 ------


@cute.jit
def low_keys(stores, stage, rS: cute.Tensor, chunk: Int32, keys: Int32, layout) -> None:
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for h in range_constexpr(2 * layout.tiles):
        for i in range_constexpr(2):
            slot = 64 * chunk + 2 * lane + i
            if slot < keys:
                put(stores, stage, warp + 8 * h, stores.cta, slot, rS[i, h])


@cute.jit
def low_bytes(stores, rP: cute.Tensor, chunk: Int32, keys: Int32, layout) -> None:
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for h in range_constexpr(2 * layout.tiles):
        for i in range_constexpr(2):
            slot = 64 * chunk + 2 * lane + i
            if slot < keys:
                byte = (rP[h // 2] >> (16 * (h % 2) + 8 * i)) & 255
                put(stores, "p_bytes", warp + 8 * h, stores.cta, slot, Uint32(byte))


@cute.jit
def low_stats(stores, rMax: cute.Tensor, own_sum: Float32, layout) -> None:
    own_max = of_own_head(rMax, layout)
    head = cute.arch.warp_idx() + 8 * own_head(layout)
    if cute.arch.lane_idx() < 2 * layout.tiles:
        put(stores, "max", head, stores.cta, 0, own_max)
        put(stores, "sum", head, stores.cta, 0, own_sum)


@cute.jit
def low_partial(stores, rAcc: cute.Tensor, layout) -> None:
    """The CTA's own partial: warp w has 64 columns."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for m in range_constexpr(layout.tiles):
        for r in range_constexpr(2):
            for u in range_constexpr(4):
                for k in range_constexpr(4):
                    head = 16 * m + 8 * r + lane // 4
                    column = 64 * warp + 16 * u + 4 * (lane % 4) + k
                    acc = rAcc[2 * r + k // 2, 2 * u + k % 2, m]
                    put(stores, "partial", head, stores.cta, column, acc)


@cute.jit
def low_owned(stores, rAcc: cute.Tensor, layout) -> None:
    """The partials of half of the CTAs, in a warp's share of the columns that this CTA owns."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    first = stores.cta * layout.cta_columns + warp % 4 * (16 * layout.units) + 4 * (lane % 4)
    for n in range_constexpr(layout.half_ctas):
        cta = warp // 4 * layout.half_ctas + n
        for m in range_constexpr(layout.tiles):
            for r in range_constexpr(2):
                for u in range_constexpr(layout.units):
                    for k in range_constexpr(4):
                        head = 16 * m + 8 * r + lane // 4
                        acc = rAcc[2 * r + k // 2, 2 * u + k % 2, m, n]
                        put(stores, "partial", head, cta, first + 16 * u + k, acc)
'''

_BASE = "kernels/base/decode.py"
_BASE_PARTIAL = "kernels/base/partial.py"
_LOW = "kernels/low_latency/decode.py"
_IMPORT = "\n\nfrom sparse_mla_kernel import stage_stores\n"


def _before(file: str, line: str, statement: str) -> Change:
    """Insert a statement before a line of the same depth."""
    indent = line[: -len(line.lstrip())]
    return Change(file, line + "\n", f"{indent}{statement}\n{line}\n")


def _softmax(indent: str, after: str, chunk: str) -> Change:
    """Store one chunk's logits and P around `chunk_p` and `quantise_p`, which `after` follows."""
    old = (
        "chunk_p(rMax, rAlpha, rChunkSum, rS, rLive, layout)",
        "quantise_p(rP, rS, layout)",
        after,
    )
    new = (
        f'stage_stores.low_keys(stores, "logits", rS, {chunk}, keys, layout)',
        old[0],
        f'stage_stores.low_keys(stores, "p", rS, {chunk}, keys, layout)',
        old[1],
        f"stage_stores.low_bytes(stores, rP, {chunk}, keys, layout)",
        old[2],
    )
    texts = ["".join(f"\n{indent}{line}" for line in lines) + "\n" for lines in (old, new)]
    return Change(_LOW, *texts)


_LOW_STORES = "stores = stage_stores.Stores(mLatent, self, row, first_head, cta)"
_LOW_STATS = "stage_stores.low_stats(stores, rMax, row_sum, layout)"

CHANGES = (
    # Base
    _before(
        _BASE,
        "        query.open(row, tile)",
        "stores = stage_stores.Stores(sink.mLatent, self, row, tile * TILE_HEADS, cta)",
    ),
    _before(
        _BASE,
        "                store_warp_max(rLogit, smem, layout)",
        "stage_stores.base_logits(stores, rLogit, c, count)",
    ),
    Change(
        _BASE,
        "store_p(rLogit, rMax, smem, layout)\n",
        "store_p(rLogit, rMax, smem, layout, stores, c, count)\n",
    ),
    Change(
        _BASE_PARTIAL,
        "    rLogit: cute.Tensor, rMax: cute.Tensor, smem: Int32, "
        "layout: cutlass.Constexpr[SharedLayout]\n",
        "    rLogit: cute.Tensor, rMax: cute.Tensor, smem: Int32, "
        "layout: cutlass.Constexpr[SharedLayout],\n"
        "    stores: object, c: Int32, count: Int32,\n",
    ),
    Change(
        _BASE_PARTIAL,
        "        store_fp8_pair_shared(row + key, rP[0], rP[1])  # R11\n",
        "        store_fp8_pair_shared(row + key, rP[0], rP[1])  # R11\n"
        "        stage_stores.base_p(stores, rP, row + key, half, c, count)\n",
    ),
    _before(
        _BASE,
        "        push_partial(rAcc, rMax, rSum, smem, cta, layout)",
        "stage_stores.base_partial(stores, rAcc, rMax, rSum)",
    ),
    # Low latency: one chunk
    _before(_LOW, "        t, _, _ = cute.arch.thread_idx()", _LOW_STORES),
    _softmax("        ", "push_p(rP, smem, cta, multiplied, layout)", "Int32(0)"),
    Change(
        _LOW,
        "\n        push_stats(rMax, row_sum, smem, cta, layout)\n\n",
        f"\n        {_LOW_STATS}\n        push_stats(rMax, row_sum, smem, cta, layout)\n\n",
    ),
    _before(
        _LOW,
        "        handed_over = HANDED_OVER + warp % COLUMN_WARPS",
        "stage_stores.low_owned(stores, rAcc, layout)",
    ),
    # Low latency: more chunks
    _before(_LOW, "        # The first chunk's P", _LOW_STORES),
    _softmax("        ", "store_p(rP, rAlpha, smem, Int32(0), layout)", "Int32(0)"),
    _softmax("            ", "store_p(rP, rAlpha, smem, following, layout)", "following"),
    Change(
        _LOW,
        "\n        push_stats(rMax, row_sum, smem, cta, layout)\n        self.meet()",
        f"\n        {_LOW_STATS}\n        push_stats(rMax, row_sum, smem, cta, layout)\n"
        "        self.meet()",
    ),
    _before(
        _LOW,
        "        push_rows(rAcc, smem, cta, layout)",
        "stage_stores.low_partial(stores, rAcc, layout)",
    ),
)

#: A fault to find: P is scaled to 447 at the largest logit. The first stage that differs is `p`.
PLANTED = Change("arithmetic/softmax.py", "math.log2(448.0)", "math.log2(447.0)")
PLANTED_STAGE = "p"


def debug_build(
    folder: Path, stages: Iterable[str] = tuple(STORED), planted: Iterable[Change] = ()
) -> Path:
    """A copy of the kernel's package that stores `stages`, in `folder`; that folder.

    Args:
        folder: Where the copy goes.
        stages: Which of `STORED` are stored.
        planted: Changes beside the stores, such as a fault.

    Raises:
        ValueError: A stage is not one of `STORED`, or a line to patch is not there exactly once.
    """
    chosen = tuple(stages)
    if unknown := [stage for stage in chosen if stage not in STORED]:
        raise ValueError(f"stages must be of {', '.join(STORED)}, got {unknown}")
    copy = copied_package(folder)
    (copy / MODULE).write_text(_HELPERS.format(stored=chosen))
    change_files(copy, (*CHANGES, *planted))
    for name in (_BASE, _BASE_PARTIAL, _LOW):
        with (copy / name).open("a") as file:
            file.write(_IMPORT)
    return folder
