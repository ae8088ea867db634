"""Tensor-core instructions as data: what each one sums at once, and to how many bits.

One *sum* takes a few products and perhaps an accumulator. Every product is exact, its significand
not renormalised and its exponent the sum of the operands' exponents; every term is truncated toward
zero to a multiple of 2^(e_max - fraction_bits), e_max the largest exponent of a term; the truncated
terms are added exactly; the result is truncated toward zero to ``output_bits`` fraction bits. An
instruction is a chain of such sums.

A zero product has no exponent; a zero accumulator has FP32's least, -126, and only BF16 products
can fall below that. From 2^128 on a sum is infinite. An exact zero is +0.
"""

from dataclasses import dataclass, replace

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Format


@dataclass(frozen=True)
class Evidence:
    """Why a model is believed.

    ``verified`` names the GPU that its outputs were compared with, bit for bit, and
    ``elements`` how many were; otherwise ``source`` is the publication it was taken from.
    """

    source: str
    verified: str | None = None
    elements: int = 0


@dataclass(frozen=True)
class Model:
    """One matrix-multiply instruction.

    Attributes:
        name: identifier, e.g. ``"SM90_E4M3"``.
        instruction: the PTX that it describes.
        sass: what that assembles to.
        operands: format of A and B.
        sums: the columns k of a step that each sum takes, in chain order; together they are one
            step of the instruction.
        accumulator_inside: C is a term of the first sum. Otherwise the chain starts without one
            and a separate FP32 add follows, D = RN(C + chain).
        fraction_bits: kept below the largest exponent when terms are aligned.
        output_bits: fraction bits of a sum's result (23: FP32).
        normalises_subnormals: a subnormal operand has the exponent of its leading bit, as after
            a conversion to a wider format; otherwise it keeps the format's least exponent.
        evidence: where the model comes from.
    """

    name: str
    instruction: str
    sass: str
    operands: Format
    sums: tuple[tuple[int, ...], ...]
    accumulator_inside: bool
    fraction_bits: int
    output_bits: int
    normalises_subnormals: bool
    evidence: Evidence

    @property
    def step(self) -> int:
        """Columns of one instruction; K of an ``mma`` is a multiple of it."""
        return sum(len(columns) for columns in self.sums)


def _columns(step: int, *remainders: int) -> tuple[int, ...]:
    return tuple(k for k in range(step) if k % 4 in remainders)


# MMA-Sim is the simulator of arXiv 2511.10909 (Microsoft, github.com/microsoft/MMA-Sim); the other
# paper, arXiv 2512.07004, reports the same numbers for the instructions that both cover.
_PUBLISHED = "arXiv 2511.10909 (MMA-Sim)"
_MMA_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
_MMA_BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_MMA_E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
_EMULATED = "emulated: unpack to FP16, 2 x HMMA.16816.F32 chained from zero, FADD"


def _compared(source: str) -> Evidence:
    """Compared on 14 families of inputs by ``sparse-mla-audit hardware``.

    Its recording ships with the verify layer.
    """
    return Evidence(source, verified="NVIDIA H200", elements=102_760_448)


def _halves(step: int) -> tuple[tuple[int, ...], ...]:
    return tuple(range(step // 2)), tuple(range(step // 2, step))


def _inside(
    name: str,
    instruction: str,
    sass: str,
    operands: Format,
    sums: tuple[tuple[int, ...], ...],
    bits: tuple[int, int],
    evidence: Evidence,
) -> Model:
    """A native instruction: C is a term, subnormal operands keep the format's least exponent."""
    return Model(name, instruction, sass, operands, sums, True, *bits, False, evidence)


SM80_F16 = _inside(
    "SM80_F16", _MMA_F16, "HMMA.16816.F32", minifloat.FP16, _halves(16), (24, 23),
    Evidence(_PUBLISHED),
)  # fmt: skip
SM80_BF16 = _inside(
    "SM80_BF16", _MMA_BF16, "HMMA.16816.F32.BF16", minifloat.BF16, _halves(16), (24, 23),
    Evidence(_PUBLISHED),
)  # fmt: skip
SM89_E4M3 = _inside(
    "SM89_E4M3", _MMA_E4M3, "QMMA.16832.F32.E4M3.E4M3", minifloat.E4M3, _halves(32), (13, 13),
    Evidence(_PUBLISHED),
)  # fmt: skip

SM90_E4M3 = Model(
    name="SM90_E4M3",
    instruction=_MMA_E4M3,
    sass=_EMULATED,
    operands=minifloat.E4M3,
    sums=(_columns(32, 0, 1), _columns(32, 2, 3)),
    accumulator_inside=False,
    fraction_bits=25,
    output_bits=23,
    normalises_subnormals=True,
    evidence=_compared(
        "recorded outputs; the order of the columns is the assembler's choice (CUDA 13.4; CUDA "
        "12.4 starts both HMMAs from zero)"
    ),
)
SM90_F16 = _inside(
    "SM90_F16", _MMA_F16, "HMMA.16816.F32", minifloat.FP16, (tuple(range(16)),), (25, 23),
    _compared(_PUBLISHED),
)  # fmt: skip
SM90_BF16 = _inside(
    "SM90_BF16", _MMA_BF16, "HMMA.16816.F32.BF16", minifloat.BF16, (tuple(range(16)),), (25, 23),
    _compared(_PUBLISHED),
)  # fmt: skip
SM90_WGMMA_F16 = _inside(
    "SM90_WGMMA_F16", "wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16", "HGMMA.64xNx16.F32",
    minifloat.FP16, (tuple(range(16)),), (25, 23), _compared(_PUBLISHED),
)  # fmt: skip
SM90_WGMMA_E4M3 = _inside(
    "SM90_WGMMA_E4M3", "wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3",
    "QGMMA.64xNx32.F32.E4M3.E4M3", minifloat.E4M3, (tuple(range(32)),), (13, 13),
    _compared(_PUBLISHED),
)  # fmt: skip

SM100_F16 = _inside(
    "SM100_F16", _MMA_F16, "HMMA.16816.F32", minifloat.FP16, (tuple(range(16)),), (25, 23),
    Evidence(_PUBLISHED),
)  # fmt: skip
SM100_BF16 = _inside(
    "SM100_BF16", _MMA_BF16, "HMMA.16816.F32.BF16", minifloat.BF16, (tuple(range(16)),), (25, 23),
    Evidence(_PUBLISHED),
)  # fmt: skip
SM100_E4M3 = replace(
    SM90_E4M3,
    name="SM100_E4M3",
    evidence=Evidence(f"sm_90's emulation over the HMMA of {_PUBLISHED}"),
)
SM100_TCGEN05_F16 = _inside(
    "SM100_TCGEN05_F16", "tcgen05.mma.kind::f16 (FP16 operands, FP32 accumulator)", "UTCHMMA",
    minifloat.FP16, (tuple(range(16)),), (25, 23), Evidence(_PUBLISHED),
)  # fmt: skip
SM100_TCGEN05_E4M3 = _inside(
    "SM100_TCGEN05_E4M3", "tcgen05.mma.kind::f8f6f4 (E4M3 operands, FP32 accumulator)", "UTCQMMA",
    minifloat.E4M3, (tuple(range(32)),), (25, 23), Evidence(_PUBLISHED),
)  # fmt: skip
SM120_F16 = _inside(
    "SM120_F16", _MMA_F16, "HMMA.16816.F32", minifloat.FP16, (tuple(range(16)),), (25, 23),
    Evidence(_PUBLISHED),
)  # fmt: skip
SM120_E4M3 = _inside(
    "SM120_E4M3", _MMA_E4M3, "QMMA.16832.F32.E4M3.E4M3", minifloat.E4M3, (tuple(range(32)),),
    (25, 23), Evidence(_PUBLISHED),
)  # fmt: skip


def _fed_with_e4m3(model: Model, name: str) -> Model:
    """An FP16 instruction after ``cvt.rn.f16x2.e4m3x2``: every E4M3 is a normal FP16 or zero."""
    return replace(
        model,
        name=name,
        instruction=f"cvt.rn.f16x2.e4m3x2, {model.instruction}",
        sass=f"F2FP.F16.E4M3.UNPACK_B, {model.sass}",
        operands=minifloat.E4M3,
        normalises_subnormals=True,
    )


SM90_E4M3_AS_F16 = _fed_with_e4m3(SM90_F16, "SM90_E4M3_AS_F16")
SM100_E4M3_AS_F16 = _fed_with_e4m3(SM100_F16, "SM100_E4M3_AS_F16")
SM120_E4M3_AS_F16 = _fed_with_e4m3(SM120_F16, "SM120_E4M3_AS_F16")

MODELS = {
    model.name: model
    for model in (
        SM80_F16, SM80_BF16, SM89_E4M3, SM90_E4M3, SM90_F16, SM90_BF16, SM90_WGMMA_F16,
        SM90_WGMMA_E4M3, SM100_F16, SM100_BF16, SM100_E4M3, SM100_TCGEN05_F16, SM100_TCGEN05_E4M3,
        SM120_F16, SM120_E4M3, SM90_E4M3_AS_F16, SM100_E4M3_AS_F16, SM120_E4M3_AS_F16,
    )
}  # fmt: skip
