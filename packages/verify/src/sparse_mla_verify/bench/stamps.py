"""A copy of the kernel's package that takes the time of its stages: the patches, as data.

A warp reads its SM's clock where a stage ends, and adds the clocks since its last reading to the
stage's sum: a stage that comes once a chunk has the time of all chunks. The sums go, at the very
end, into the latent columns that the CTA owns, over what it has computed; the last reading and the
SM's number go with them, which tell how fast the clock runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparse_mla_verify.processes.patched_kernel import Change, copied_package, replaced

#: The stages, in the order of their words in the output. The words of stages that a path does not
#: have are 0.
TIMED_STAGES = (
    "start",
    "pdl",
    "count",
    "ids",
    "gather",
    "query",
    "keys",
    "qk",
    "barriers",
    "softmax",
    "pv",
    "pv_softmax",
    "push",
    "values",
    "peers",
    "merge",
    "store",
)
#: The first stage after the wait for the launch before.
FIRST = TIMED_STAGES.index("count")
#: After the sums: the last reading of the clock, and which SM's it is.
CLOCK, SM = len(TIMED_STAGES), len(TIMED_STAGES) + 1
#: Words that a warp writes, an even number.
WORDS = 2 * ((SM + 2) // 2)

HELPERS = f'''"""The clock of the SM, stage by stage."""

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from sparse_mla_kernel.ptx.global_memory import store_global_b32x2

LAST = {WORDS}  # the last reading, after all that is written


@dsl_user_op
def clock(after=None, *, loc=None, ip=None):
    """The clock, read under a predicate of `after` if there is one: not before that is there."""
    operands, kinds, text = [], "=r", "mov.u32 $0, %clock;"
    if after is not None:
        operands = [after.ir_value(loc=loc, ip=ip)]
        kinds, other = ("=r,f", "neu.f32 p, $1, 0f7F7FFFFF")
        if not isinstance(after, Float32):
            kinds, other = ("=r,r", "ne.s32 p, $1, 0x80000000")
        text = f"{{{{ .reg .pred p; setp.{{other}}; mov.u32 $0, 0; @p mov.u32 $0, %clock; }}}}"
    made = llvm.inline_asm(
        T.i32(), operands, text, kinds, has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )
    return Int32(made)


@dsl_user_op
def sm(*, loc=None, ip=None):
    """The number of the SM."""
    made = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %smid;", "=r", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )
    return Int32(made)


@cute.jit
def first_lap():
    """Sums of 0, and the clock now."""
    rT = cute.make_rmem_tensor(LAST + 1, Int32)
    rT.fill(0)
    rT[LAST] = clock()
    return rT


@cute.jit
def lap(rT: cute.Tensor, stage: cutlass.Constexpr[int], after=None) -> None:
    """The stage ends here, once `after` is there."""
    now = clock(after)
    rT[stage] = rT[stage] + (now - rT[LAST])
    rT[LAST] = now


@cute.jit
def store_laps(rT: cute.Tensor, mLatent: cute.Tensor, row: Int32, head: Int32, column: Int32):
    """Lane 0 of each warp: the sums, from a latent column of a head on."""
    if cute.arch.lane_idx() == 0:
        rT[{CLOCK}], rT[{SM}] = rT[LAST], sm()
        gOut = mLatent[row, head, None].iterator + column
        for k in cutlass.range_constexpr(LAST // 2):
            low, high = Uint32(rT[2 * k]), Uint32(rT[2 * k + 1])
            store_global_b32x2((gOut + 4 * k).toint(), low, high)
'''
_IMPORT = "\n\nfrom sparse_mla_kernel.laps import first_lap, lap, store_laps\n"

BASE_FILE = "kernels/base/decode.py"
GATHER_FILE = "kernels/base/gather.py"
QUERY_FILE = "kernels/base/query.py"
MERGE_FILE = "kernels/base/merge.py"
LOW_FILE = "kernels/low_latency/decode.py"


@dataclass(frozen=True)
class Mark:
    """A stage ends before `line`, which `function` has exactly once; "" is the function's end.

    With `value` the stage ends once that value of the source's is there.
    """

    file: str
    function: str
    stage: str
    line: str
    value: str = ""

    @property
    def statement(self) -> str:
        """What is inserted."""
        number = TIMED_STAGES.index(self.stage)
        if self.value:
            return f"lap(rT, {number}, {self.value})"
        return f"lap(rT, {number})"


MARKS = (
    # Base. A CTA has one barrier for a chunk's keys and the query: both are "keys".
    Mark(BASE_FILE, "attend", "start", "cute.arch.griddepcontrol_wait()"),
    Mark(BASE_FILE, "attend", "pdl", "cute.arch.griddepcontrol_launch_dependents()"),
    Mark(BASE_FILE, "attend", "count", "begin, end = split_keys(n, cta, split)", "n"),
    Mark(BASE_FILE, "attend", "barriers", "start = begin + c * chunk"),
    Mark(
        GATHER_FILE,
        "gather_chunk",
        "ids",
        "row_address = smem + layout.kv + t * ROW_STRIDE_BYTES",
        "row_id",
    ),
    Mark(
        BASE_FILE,
        "attend",
        "gather",
        "cute.arch.mbarrier_wait(storage + layout.gather_barrier, c % 2)",
    ),
    Mark(BASE_FILE, "attend", "keys", "scaled_logits(rLogit, smem, count, scale_log2, layout)"),
    Mark(
        BASE_FILE,
        "attend",
        "qk",
        "store_warp_max(rLogit, smem, layout)",
        "rLogit[0]",
    ),
    Mark(BASE_FILE, "attend", "softmax", "cute.arch.sync_threads()  # warp_max is whole"),
    Mark(BASE_FILE, "attend", "barriers", "raise_max(rMax, rAlpha, smem, layout)"),
    Mark(BASE_FILE, "attend", "softmax", "cute.arch.sync_threads()  # P and warp_sum are whole"),
    Mark(BASE_FILE, "attend", "barriers", "raise_sum(rSum, rAlpha, smem, layout)"),
    Mark(BASE_FILE, "attend", "softmax", "accumulate(rAcc, smem, count, layout)"),
    Mark(BASE_FILE, "attend", "pv", "cute.arch.sync_threads()  # the chunk's buffers are free"),
    Mark(BASE_FILE, "attend", "barriers", "cute.arch.cluster_wait()"),
    Mark(BASE_FILE, "attend", "peers", "push_partial(rAcc, rMax, rSum, smem, cta, layout)"),
    Mark(
        BASE_FILE,
        "attend",
        "push",
        "cute.arch.mbarrier_wait(storage + layout.merge_barrier, 0)",
    ),
    Mark(
        BASE_FILE,
        "attend",
        "peers",
        "self.merge(sink, smem, out_scale)",
    ),
    # Low latency: what all keys have
    Mark(LOW_FILE, "kernel", "start", "cute.arch.griddepcontrol_wait()"),
    Mark(LOW_FILE, "kernel", "pdl", "cute.arch.griddepcontrol_launch_dependents()"),
    Mark(LOW_FILE, "multiply", "count", "most = keys_dealt(n, Int32(0), schedule)", "loaded"),
    Mark(LOW_FILE, "multiply", "ids", "keys = keys_dealt(n, cta, schedule)", "key_id"),
    Mark(
        LOW_FILE,
        "multiply",
        "gather",
        "cute.arch.cluster_wait()  # all CTAs have their barriers",
    ),
    Mark(
        LOW_FILE,
        "multiply",
        "query",
        "cute.arch.mbarrier_wait(storage + layout.first_barrier, 0)",
    ),
    Mark(
        LOW_FILE,
        "multiply",
        "keys",
        "shared = (mLatent, mLse, storage, row, first_head, cta, keys)",
    ),
    # Low latency: one chunk
    Mark(LOW_FILE, "together", "qk", "self.meet()  # logits are whole"),
    Mark(LOW_FILE, "together", "barriers", "load_logits(rS, rLive, smem, Int32(0), layout)"),
    Mark(LOW_FILE, "together", "softmax", "push_p(rP, smem, cta, multiplied, layout)"),
    Mark(
        LOW_FILE,
        "together",
        "push",
        "rWeight = cute.make_rmem_tensor(layout.split, Float32)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "values",
        "cute.arch.mbarrier_wait(storage + layout.p_barrier, 0)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "peers",
        "accumulate_from(rAcc, smem, 0, layout.half_ctas // 2, multiplied, layout)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "pv",
        "cute.arch.mbarrier_wait(storage + layout.stats_barrier, 0)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "peers",
        "top, total, inverse = weigh_partials(rWeight, smem, out_scale, layout)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "merge",
        "accumulate_from(rAcc, smem, layout.half_ctas // 2, layout.half_ctas, multiplied, layout)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "pv",
        "rRow = cute.make_rmem_tensor((4, layout.units, 2, layout.tiles), Float32)",
    ),
    Mark(
        LOW_FILE,
        "together",
        "merge",
        "cute.arch.barrier(barrier_id=handed_over, number_of_threads=HALVES * WARP)",
    ),
    Mark(LOW_FILE, "together", "barriers", "hand_over(rRow, smem, True, layout)"),
    Mark(LOW_FILE, "together", "merge", "columns = cta * layout.cta_columns"),
    # Low latency: more chunks
    Mark(LOW_FILE, "apart", "qk", "self.meet()  # logits are whole"),
    Mark(LOW_FILE, "apart", "barriers", "load_logits(rS, rLive, smem, Int32(0), layout)"),
    Mark(LOW_FILE, "apart", "softmax", "for c in cutlass.range(chunks - 1, unroll=1):"),
    Mark(
        LOW_FILE,
        "apart",
        "keys",
        "quarter_logits(rQuery, smem, following, keys - CHUNK * following, layout)",
    ),
    Mark(LOW_FILE, "apart", "qk", "self.meet()  # logits, P and alpha are whole"),
    Mark(LOW_FILE, "apart", "barriers", "load_logits(rS, rLive, smem, following, layout)"),
    Mark(
        LOW_FILE,
        "apart",
        "pv_softmax",
        "cute.arch.mbarrier_arrive(storage + (layout.free_barrier + 8 * (c % BUFFERS)))",
    ),
    Mark(LOW_FILE, "apart", "push", "self.meet()  # P and alpha are whole"),
    Mark(LOW_FILE, "apart", "barriers", "final = chunks - 1"),
    Mark(LOW_FILE, "apart", "pv", "cute.arch.cluster_arrive()"),
    Mark(LOW_FILE, "apart", "peers", "push_rows(rAcc, smem, cta, layout)"),
    Mark(LOW_FILE, "apart", "push", "rWeight = cute.make_rmem_tensor(layout.split, Float32)"),
    Mark(
        LOW_FILE,
        "apart",
        "peers",
        "top, total, inverse = weigh_partials(rWeight, smem, out_scale, layout)",
    ),
    Mark(LOW_FILE, "apart", "merge", "self.meet()  # this CTA's own partial is whole"),
    Mark(
        LOW_FILE, "apart", "barriers", "cute.arch.mbarrier_wait(storage + layout.rows_barrier, 0)"
    ),
    Mark(LOW_FILE, "apart", "peers", "unit = warp % WARP_UNITS"),
)

_STORE, _MERGE = TIMED_STAGES.index("store"), TIMED_STAGES.index("merge")

CHANGES = (
    Change(
        BASE_FILE,
        "        # Roles\n",
        "        rT = first_lap()\n        # Roles\n",
    ),
    Change(
        BASE_FILE,
        "        query.open(row, tile)\n",
        "        query.rT, sink.rT = rT, rT\n        query.open(row, tile)\n",
    ),
    Change(
        GATHER_FILE,
        "def gather_chunk(\n",
        "def gather_chunk(\n    rT: cute.Tensor,\n",
    ),
    Change(
        QUERY_FILE,
        "gather_chunk(mKv, gIds, self.gQuery,",
        "gather_chunk(self.rT, mKv, gIds, self.gQuery,",
    ),
    Change(
        MERGE_FILE,
        "                write_columns(gColumns, low, high)\n",
        f"                lap(self.rT, {_MERGE}, low)\n"
        "                write_columns(gColumns, low, high)\n",
    ),
    Change(
        BASE_FILE,
        "        self.merge(sink, smem, out_scale)\n",
        "        self.merge(sink, smem, out_scale)\n"
        f"        lap(rT, {_STORE})\n"
        "        cute.arch.sync_threads()\n"
        "        store_laps(\n"
        "            rT, sink.mLatent, row, tile * TILE_HEADS + warp, cta * layout.cta_columns\n"
        "        )\n",
    ),
    Change(
        LOW_FILE,
        "        # Roles\n",
        "        rT = first_lap()\n        # Roles\n",
    ),
    Change(
        LOW_FILE,
        "            self.multiply(\n",
        "            self.multiply(\n                rT,\n",
    ),
    *(
        Change(
            LOW_FILE,
            f"    def {name}(\n        self,\n",
            f"    def {name}(\n        self,\n        rT: cute.Tensor,\n",
        )
        for name in ("multiply", "together", "apart")
    ),
    Change(
        LOW_FILE,
        "            self.together(rQuery, *shared, multiplied, scale_log2, out_scale)\n",
        "            self.together(rT, rQuery, *shared, multiplied, scale_log2, out_scale)\n"
        f"            lap(rT, {_STORE})\n",
    ),
    # Its merge and its stores alternate
    Change(
        LOW_FILE,
        "            self.apart(rQuery, *shared, scale_log2, out_scale)\n",
        "            self.apart(rT, rQuery, *shared, scale_log2, out_scale)\n"
        f"            lap(rT, {_MERGE})\n"
        "        self.meet()\n"
        "        head = first_head + cute.arch.warp_idx()\n"
        "        store_laps(rT, mLatent, row, head, cta * layout.cta_columns)\n",
    ),
)


def stamped(folder: Path) -> Path:
    """A copy of the kernel's package that takes its stages' times, in `folder`; that folder.

    Raises ValueError when a line to patch isn't there exactly once.
    """
    copy = copied_package(folder)
    (copy / "laps.py").write_text(HELPERS)
    for name in (BASE_FILE, GATHER_FILE, QUERY_FILE, MERGE_FILE, LOW_FILE):
        file = copy / name
        source = marked(file.read_text(), [mark for mark in MARKS if mark.file == name])
        for change in CHANGES:
            if change.file == name:
                source = replaced(source, change.old, change.new, f"{name}: {change.old!r}:")
        file.write_text(source + _IMPORT)
    return folder


def marked(source: str, marks: Iterable[Mark]) -> str:
    """A source with the marks' statements. Raises ValueError as :func:`stamped`."""
    lines = source.split("\n")
    inserted: dict[int, str] = {}
    for mark in marks:
        body = _body(lines, mark)
        hits = [k for k in body if lines[k].strip() == mark.line]
        if len(hits) != 1:
            what = f"{mark.file}, {mark.function}: {mark.line!r}"
            raise ValueError(f"{what} must have the line to patch once, got {len(hits)} of it")
        indent = lines[hits[0]][: -len(lines[hits[0]].lstrip())]
        inserted[hits[0]] = indent + mark.statement
    return "\n".join(
        part
        for k, line in enumerate(lines)
        for part in ([inserted[k], line] if k in inserted else [line])
    )


def _body(lines: list[str], mark: Mark) -> range:
    """The lines of a function, from its `def` to what is indented no more than it."""
    starts = [k for k, line in enumerate(lines) if re.match(rf" *def {mark.function}\(", line)]
    if len(starts) != 1:
        what = f"{mark.file}, {mark.function}"
        raise ValueError(f"{what} must have the line to patch once, got {len(starts)} of it")
    start = starts[0]
    depth = len(lines[start]) - len(lines[start].lstrip())
    opened = next(k for k in range(start, len(lines)) if lines[k].rstrip().endswith(":"))
    for k in range(opened + 1, len(lines)):
        text = lines[k].strip()
        if text and len(lines[k]) - len(lines[k].lstrip()) <= depth:
            return range(start, k)
    return range(start, len(lines))
