"""Tensor-core instructions as data: what each one sums at once, and to how many bits.

One *sum* takes a few products and perhaps an accumulator. Every product is exact, its significand
not renormalised and its exponent the sum of the operands' exponents; every non-zero term is
truncated toward zero to a multiple of 2^(e_max - fraction_bits), e_max the largest exponent of a
non-zero term; the truncated terms are added exactly; the result is truncated toward zero to
``output_bits`` fraction bits. An instruction is a chain of such sums.
"""

from dataclasses import dataclass

from sparse_mla_reference import minifloat
from sparse_mla_reference.minifloat import Format


@dataclass(frozen=True)
class Evidence:
    """Why a model is believed.

    ``verified`` names the machine that its outputs were compared with, bit for bit, and
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


SM90_E4M3 = Model(
    name="SM90_E4M3",
    instruction="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    sass="emulated: F2FP unpack to FP16, 2 x HMMA.16816.F32 chained from zero, FADD",
    operands=minifloat.E4M3,
    sums=(_columns(32, 0, 1), _columns(32, 2, 3)),
    accumulator_inside=False,
    fraction_bits=25,
    output_bits=23,
    normalises_subnormals=True,
    evidence=Evidence(
        source="recorded outputs of the instruction (assembler of CUDA 13)",
        verified="NVIDIA H200",
        elements=65_536,
    ),
)

SM120_E4M3 = Model(
    name="SM120_E4M3",
    instruction="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    sass="QMMA.16832.F32.E4M3.E4M3",
    operands=minifloat.E4M3,
    sums=(tuple(range(32)),),
    accumulator_inside=True,
    fraction_bits=25,
    output_bits=23,
    normalises_subnormals=False,
    evidence=Evidence(source="published models of sm_120: arXiv 2511.10909, arXiv 2512.07004"),
)
