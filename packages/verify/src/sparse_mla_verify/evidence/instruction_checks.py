"""What a kernel's PTX and SASS must look like: one check in each function, with its reason.

Bits may agree by luck of the data. These checks show why they agree, and they find a compiler that
makes other instructions of the same source.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Protocol


class Artifact(Protocol):
    """What a compiler made of a kernel."""

    @property
    def arch(self) -> str:
        """The architecture, such as `sm_90a`."""

    @property
    def ptx(self) -> str:
        """The PTX."""

    def sass(self) -> str:
        """The disassembly of the cubin."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its predicate (or ""), its name with modifiers, its operands."""

    predicate: str
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class CodeFinding:
    """A check's verdict and why: what was found, or what is wrong."""

    ok: bool
    reason: str


class Code:
    """A kernel's instructions in the order of the text."""

    def __init__(self, artifact: Artifact) -> None:
        self.arch = artifact.arch
        self.ptx_text = artifact.ptx
        self._disassemble = artifact.sass

    @cached_property
    def ptx(self) -> tuple[Instruction, ...]:
        """PTX instructions; labels are instructions named `label`."""
        lines = re.sub(r"//[^\n]*", "", self.ptx_text).splitlines()
        return tuple(i for line in lines for i in _ptx_line(line.strip()))

    @cached_property
    def sass(self) -> tuple[Instruction, ...]:
        """SASS instructions."""
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+?)\s*;", self._disassemble())
        return tuple(_split(text) for text in found)

    def named(self, pattern: str) -> list[Instruction]:
        """The PTX instructions whose whole name matches."""
        return [i for i in self.ptx if re.fullmatch(pattern, i.name)]

    def first(self, pattern: str) -> int:
        """The index of the first such PTX instruction; past the end if there is none."""
        hits = (k for k, i in enumerate(self.ptx) if re.fullmatch(pattern, i.name))
        return next(hits, len(self.ptx))


def _ptx_line(line: str) -> list[Instruction]:
    """The instructions of a line: inline assembly has several, in braces."""
    if label := re.fullmatch(r"([$\w]+):", line):
        return [Instruction("", "label", (label[1],))]
    statements = (part.strip().lstrip("{").strip() for part in line.split(";")[:-1])
    return [_split(text) for text in statements if re.match(r"[@a-z]", text)]


def _split(text: str) -> Instruction:
    predicate, rest = ("", text)
    if text.startswith("@"):
        predicate, rest = text.split(None, 1)
    name, _, operands = rest.partition(" ")
    return Instruction(predicate, name, tuple(o.strip() for o in operands.split(",")))


# Global memory reads: loads, prefetches, and bulk copies whose source is global.
_READS = "|".join(
    (
        r"ld[.\w]*\.global[.\w:]*",
        r"ldu[.\w]*\.global[.\w:]*",
        r"prefetch[.\w:]*",
        r"applypriority[.\w:]*",
        r"cp\.async\.(?!bulk|commit|wait)[.\w:]*",
        r"cp\.async\.bulk[.\w:]*\.global[.\w:]*",
        r"(atom|red)[.\w:]*\.global[.\w:]*",
    )
)
_WAIT = r"griddepcontrol\.wait"


def waits_before_reads(code: Code) -> CodeFinding:
    """Every thread passes `griddepcontrol.wait` before any thread reads global memory."""
    wait = code.first(_WAIT)
    if wait == len(code.ptx):
        return CodeFinding(False, "there is no griddepcontrol.wait")
    if code.ptx[wait].predicate:
        return CodeFinding(False, f"the wait is predicated: {code.ptx[wait].predicate}")
    if (read := code.first(_READS)) < wait:
        return CodeFinding(False, f"{code.ptx[read].name} comes before the wait")
    generic = code.first(r"(ld|cp)\.(?!param|shared|global|const|async)[.\w:]*")
    if generic < wait:
        return CodeFinding(False, f"{code.ptx[generic].name} may read anywhere, before the wait")
    labels = {i.operands[0]: k for k, i in enumerate(code.ptx) if i.name == "label"}
    for instruction in code.ptx[:wait]:
        if instruction.name in ("ret", "exit"):
            return CodeFinding(False, "some threads may leave before the wait")
        if instruction.name.startswith("bra") and labels[instruction.operands[0]] > wait:
            return CodeFinding(False, f"a branch to {instruction.operands[0]} passes the wait by")
    reads = len(code.named(_READS))
    return CodeFinding(reads > 0, f"{reads} global reads, all after the wait")


def launches_dependents_at_once(code: Code) -> CodeFinding:
    """`griddepcontrol.launch_dependents` comes right after the wait."""
    wait = code.first(_WAIT)
    follows = [i.name for i in code.ptx[wait + 1 : wait + 2]]
    ok = follows == ["griddepcontrol.launch_dependents"]
    return CodeFinding(ok, f"after the wait: {follows[0] if follows else 'nothing'}")


def gathers_asynchronously(code: Code) -> CodeFinding:
    """Keys and values reach shared memory only by asynchronous copies that an mbarrier counts.

    Bulk copies count their bytes. For a lane's copies of 16 bytes, the lane arrives when they land.
    """
    bulk = code.named(
        r"cp\.async\.bulk\.shared::(cluster|cta)\.global"
        r"\.mbarrier::complete_tx::bytes[.\w:]*"
    )
    vectors = code.named(r"cp\.async\.cg\.shared\.global")
    arrivals = code.named(r"cp\.async\.mbarrier\.arrive\.noinc[.\w:]*")
    other = [i.name for i in code.named(r"cp\..*") if i not in (*bulk, *vectors, *arrivals)]
    if not _unpacks(code):
        other += [i.name for i in (*vectors, *arrivals)]  # bulk copies alone
    if not bulk or other or bool(vectors) != bool(arrivals):
        return CodeFinding(False, f"{len(bulk)} bulk copies; beside them {sorted(set(other))}")
    sizes = ", ".join(sorted({i.operands[2] for i in bulk}))
    beside = f", {len(vectors)} of 16 bytes a lane" if vectors else ""
    return CodeFinding(True, f"{len(bulk)} bulk copies of {sizes} bytes{beside}")


_PEERS = r"st\.async.*|cp\.async\.bulk.*\.multicast::cluster.*"


def _sent_too_early(code: Code) -> Instruction | None:
    """Find a store to another CTA that a path reaches before all CTAs have started.

    All CTAs have started once a thread has passed a `barrier.cluster.wait` after its latest
    `barrier.cluster.arrive`; a wait without an arrive is an error as well. Where paths join, the
    path that has done less counts.
    """
    labels: dict[str, list[int]] = {}
    for k, i in enumerate(code.ptx):
        if i.name == "label":
            labels.setdefault(i.operands[0], []).append(k)
    done: dict[int, int] = {}  # instruction -> 0, 1 after an arrive, 2 after a wait
    work = [(0, 0)]
    while work:
        k, state = work.pop()
        if k >= len(code.ptx) or done.get(k, 3) <= state:
            continue
        done[k] = state
        i = code.ptx[k]
        arrives, waits = (
            i.name.startswith(f"barrier.cluster.{what}") for what in ("arrive", "wait")
        )
        if (re.fullmatch(_PEERS, i.name) and state < 2) or (waits and state != 1):
            return i
        if arrives or (waits and not i.predicate):
            state = 1 if arrives else 2
        jumps = i.name in ("ret", "exit", "trap") or i.name.startswith("bra")
        if not jumps or i.predicate:
            work.append((k + 1, state))
        if i.name.startswith("bra"):
            # Inline assembly has labels of its own, the same in every place: the nearest is meant.
            work.append((min(labels[i.operands[0]], key=lambda at: abs(at - k)), state))
    return None


def merges_over_the_cluster(code: Code) -> CodeFinding:
    """Data goes to other CTAs by `st.async` on an mbarrier, after all of them have started."""
    pushes = code.named(r"st\.async[.\w:]*\.mbarrier::complete_tx::bytes[.\w:]*")
    if not pushes or len(pushes) != len(code.named(r"st\.async.*")):
        return CodeFinding(
            False, f"{len(pushes)} st.async count on an mbarrier; there must be some"
        )
    if plain := code.named(r"st\.(?!async)[.\w:]*shared::cluster[.\w:]*"):
        return CodeFinding(False, f"{plain[0].name} reaches a peer past the mbarrier")
    if early := _sent_too_early(code):
        return CodeFinding(False, f"a path to {early.name} has no cluster barrier (arrive, wait)")
    if not code.named(r"mapa\.shared::cluster.*"):
        return CodeFinding(False, "no address of a peer is formed (mapa)")
    types = {i.name.rsplit(".", 1)[-1] for i in pushes}
    # Where products are FP16, P travels as bytes too; the base schedule sends partials alone.
    ok = "f32" in types <= ({"f32", "b32"} if _unpacks(code) else {"f32"})
    return CodeFinding(ok, f"{len(pushes)} st.async of {', '.join(sorted(types))}")


_E4M3_MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
_F16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
_UNPACK = "cvt.rn.f16x2.e4m3x2"


def _unpacks(code: Code) -> bool:
    """Whether the products are FP16: a low-latency schedule."""
    return bool(code.named(re.escape(_F16_MMA)))


def multiplies_into_fp32(code: Code) -> CodeFinding:
    """All products are one kind of `mma.sync` into FP32: of E4M3, or of FP16 made from E4M3."""
    every = code.named(r"(mma|wgmma|tcgen05)\..*")
    names = {i.name for i in every}
    if names not in ({_E4M3_MMA}, {_F16_MMA}):
        return CodeFinding(False, f"{len(every)} MMA instructions: {sorted(names)}")
    unpacks = len(code.named(re.escape(_UNPACK)))
    if (names == {_F16_MMA}) != (unpacks > 0):
        return CodeFinding(False, f"{unpacks} {_UNPACK} beside {len(every)} x {names.pop()}")
    return CodeFinding(True, f"{len(every)} x {names.pop()}")


def exponentiates_by_ex2(code: Code) -> CodeFinding:
    """Every exponential is `ex2.approx.ftz.f32`; no other instruction approximates or flushes."""
    ex2 = code.named(r"ex2\..*")
    rough = code.named(r"(?!ex2\b)\w+\.(?:[\w:]+\.)*(approx|full|ftz)(\.[\w:]+)*")
    wrong = {i.name for i in ex2 if i.name != "ex2.approx.ftz.f32"} | {i.name for i in rough}
    ok = bool(ex2) and not wrong
    return CodeFinding(ok, f"{len(ex2)} ex2; others that approximate or flush: {sorted(wrong)}")


def divides_correctly_rounded(code: Code) -> CodeFinding:
    """Every division is `div.rn.f32`."""
    divisions = {i.name for i in code.named(r"(div\.[.\w]*f\d+|rcp\..*)")}
    return CodeFinding(divisions == {"div.rn.f32"}, f"divisions: {sorted(divisions)}")


def rounds_to_nearest(code: Code) -> CodeFinding:
    """All FP32 arithmetic rounds to nearest even, and there is no FP16 or BF16 arithmetic."""
    arithmetic = code.named(r"(add|sub|mul|fma|mad)\.[.\w]*(f16|bf16|f32|f64)[.\w]*")
    wrong = {i.name for i in arithmetic if not re.fullmatch(r"\w+(\.rn)?\.f32", i.name)}
    ok = bool(arithmetic) and not wrong
    return CodeFinding(ok, f"{len(arithmetic)} FP32 operations; others: {sorted(wrong)}")


def converts_by_contract(code: Code) -> CodeFinding:
    """`cvt.rn.satfinite.e4m3x2` makes P E4M3, and `cvt.rn.bf16x2` makes the output BF16."""
    narrow = code.named(r"cvt\.[.\w]*(e4m3|e5m2|e2m3|e3m2|e2m1|bf16|f16|tf32)[.\w]*")
    names = {i.name for i in narrow} - {_UNPACK}  # widening, exact
    wanted = {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.bf16x2.f32"}
    return CodeFinding(names == wanted, f"narrowing converts: {sorted(names)}")


def keeps_registers(code: Code) -> CodeFinding:
    """The PTX uses no local memory, and the SASS spills no registers."""
    if not code.ptx or not any(i.name == "EXIT" for i in code.sass):
        return CodeFinding(False, "the PTX is empty, or the SASS has no EXIT")
    local = len(re.findall(r"\.local\b", code.ptx_text))
    spills = [i.name for i in code.sass if re.match(r"(LDL|STL)\b", i.name)]
    return CodeFinding(
        not local and not spills, f"{local} uses of .local, {len(spills)} LDL or STL"
    )


def waits_first_in_sass(code: Code) -> CodeFinding:
    """In the SASS, the wait (`ACQBULK`) comes before the first load, and `PREEXIT` is present."""
    names = [i.name.split(".")[0] for i in code.sass]
    reads = [
        k for k, name in enumerate(names) if name in ("LDG", "UBLKCP", "LD", "CCTLL", "LDGSTS")
    ]
    if "ACQBULK" not in names or "PREEXIT" not in names or not reads:
        return CodeFinding(False, "no ACQBULK, no PREEXIT or no load")
    wait = names.index("ACQBULK")
    ok = wait < reads[0] and not code.sass[wait].predicate
    return CodeFinding(ok, f"ACQBULK at {wait}, the first of {len(reads)} loads at {reads[0]}")


# The MMA in SASS


def multiplies_by_the_model(code: Code) -> CodeFinding:
    """In the SASS, each product is what the reference models: emulated E4M3, or one FP16 HMMA.

    E4M3 before sm_120 is two chained FP16 HMMA from zero and one FP32 add of C. facts: t1 = HMMA(k
    mod 4 in {0, 1}, 0), t2 = HMMA(k mod 4 in {2, 3}, t1), D = RN(C + t2). The low half of each word
    of four E4M3 bytes has the k mod 4 in {0, 1}. Native on sm_120: one QMMA. FP16: one HMMA with
    the accumulator inside.
    """
    multiplies = [i.name for i in code.sass if re.match(r"[A-Z]*MMA\b", i.name)]
    wanted = len(code.named(r"mma\.sync\..*"))
    if code.named(re.escape(_F16_MMA)):
        ok = set(multiplies) == {"HMMA.16816.F32"} and len(multiplies) == wanted
        return CodeFinding(
            ok, f"{len(multiplies)} x {sorted(set(multiplies))} for {wanted} mma.sync"
        )
    if code.arch.startswith("sm_120"):
        ok = bool(multiplies) and {n.split(".")[0] for n in multiplies} == {"QMMA"}
        return CodeFinding(ok, f"{len(multiplies)} x {sorted(set(multiplies))}")
    try:
        pairs = _follow_hmma(code.sass)
    except _Broken as broken:
        return CodeFinding(False, str(broken))
    ok = pairs == wanted > 0
    return CodeFinding(ok, f"{pairs} chained HMMA pairs with an FADD for {wanted} mma.sync")


class _Broken(Exception):
    """The HMMA sequence is not the one of the model."""


def _follow_hmma(sass: tuple[Instruction, ...]) -> int:
    """Count the HMMA pairs; raises _Broken where one is not as the model has it."""
    half: dict[int, bool] = {}  # register -> whether it holds an unpacked high half
    first: set[int] = set()  # registers with t1
    second: set[int] = set()  # registers with t2 that no FADD has read yet
    pairs = 0
    for instruction in sass:
        name, operands = instruction.name, instruction.operands
        reads = {r for o in operands[1:] for r in _registers(o)}
        if name == "HMMA.16816.F32":
            d, a, b = (_register(o) for o in operands[:3])
            quad = set(range(d, d + 4))
            halves = {half.get(r) for r in (*range(a, a + 4), *range(b, b + 2))}
            if second & quad:
                raise _Broken(f"R{d}: an HMMA overwrites a product that was never added")
            if operands[3] == "RZ":
                if halves != {False}:
                    raise _Broken(f"R{d}: the first HMMA takes other than low halves")
                first |= quad
            elif _register(operands[3]) == d and quad <= first:
                if halves != {True}:
                    raise _Broken(f"R{d}: the second HMMA takes other than high halves")
                first, second, pairs = first - quad, second | quad, pairs + 1
            else:
                raise _Broken(f"R{d}: an HMMA accumulates onto {operands[3]}")
            continue
        if re.match(r"[A-Z]*MMA\b", name):
            raise _Broken(f"{name} beside HMMA.16816.F32")
        if reads & first or (reads & second and name != "FADD"):
            raise _Broken(f"{name} reads a product that FADD must add")
        second -= reads
        if name.startswith("F2FP.F16.E4M3.UNPACK_B"):
            half[_register(operands[0])] = operands[1].endswith(".H1")
        elif operands and (written := _registers(operands[0])):
            half.pop(written[0], None)
            if set(written) & (first | second):
                raise _Broken(f"{name} overwrites a product")
    if first or second:
        raise _Broken(f"{len(first | second)} registers hold products that were never added")
    return pairs


def _registers(operand: str) -> list[int]:
    return [int(n) for n in re.findall(r"(?<![A-Z])R(\d+)\b", operand)]


def _register(operand: str) -> int:
    found = _registers(operand)
    if len(found) != 1:
        raise _Broken(f"{operand} is not one register")
    return found[0]


CODE_CHECKS: MappingProxyType[str, Callable[[Code], CodeFinding]] = MappingProxyType(
    {
        check.__name__.replace("_", "-"): check
        for check in (
            waits_before_reads,
            waits_first_in_sass,
            launches_dependents_at_once,
            gathers_asynchronously,
            merges_over_the_cluster,
            multiplies_into_fp32,
            multiplies_by_the_model,
            exponentiates_by_ex2,
            divides_correctly_rounded,
            rounds_to_nearest,
            converts_by_contract,
            keeps_registers,
        )
    }
)


def check_structure(artifact: Artifact) -> dict[str, CodeFinding]:
    """Every check of `CODE_CHECKS` on a compiled kernel."""
    code = Code(artifact)
    return {name: check(code) for name, check in CODE_CHECKS.items()}
