"""The tensor-core instructions that are compared: which model, and how their operands lie.

A *problem* is D = A x B + C with A [128, K] and B [K, 128], K one or more steps of the instruction.
All five instructions take 32 bytes of a row of A, or of a column of B, in one step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import mma_models
from sparse_mla_reference.instructions.mma_models import Model
from sparse_mla_reference.instructions.tensor_core import mma
from sparse_mla_verify.hardware import families
from sparse_mla_verify.hardware.families import SIDE, STEPS

# 14 families x 28 chunks x 16 problems of 128 x 128: 102,760,448 outputs.
PROBLEMS = 16
CHUNKS = 28
STEP_BYTES = 32

Problems = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]


@dataclass(frozen=True)
class MatrixInstruction:
    """A tensor-core instruction of sm_90.

    Attributes:
        name: of the reference's model.
        ptx: what the GPU runs, N = 64 where the model leaves it open.
        sass: text that its machine code must have.
        operand: numpy's name of the type of A and B.
    """

    name: str
    ptx: str
    sass: str
    operand: str

    @property
    def model(self) -> Model:
        """The reference's model. Raises AttributeError where it has none of this name."""
        model: Model = getattr(mma_models, self.name)
        return model


INSTRUCTIONS = {
    instruction.name: instruction
    for instruction in (
        MatrixInstruction("SM90_E4M3", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
                    "HMMA.16816.F32", "uint8"),
        MatrixInstruction("SM90_F16", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
                    "HMMA.16816.F32", "float16"),
        MatrixInstruction("SM90_BF16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
                    "HMMA.16816.F32.BF16", "bfloat16"),
        MatrixInstruction("SM90_WGMMA_F16", "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
                    "HGMMA.64x64x16.F32", "float16"),
        MatrixInstruction("SM90_WGMMA_E4M3", "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
                    "QGMMA.64x64x32.F32.E4M3.E4M3", "uint8"),
    )
}  # fmt: skip


def problems(name: str, family: str, chunk: int) -> Problems:
    """The inputs of a chunk, the same at every call.

    Returns:
        A [16, 128, 32 S] and B [16, 128, 32 S], bytes, the second by columns, S steps; C
        [16, 128, 128] float32.
    """
    model = INSTRUCTIONS[name].model
    steps = STEPS.get(family, 1)
    rng = np.random.default_rng([*f"{name}/{family}".encode(), chunk])
    shape = families.Shape(PROBLEMS, SIDE, steps * model.step)
    with np.errstate(all="ignore"):
        a, b, c = families.MATRIX_FAMILIES[family](rng, model.operands, shape)
    a, b = (np.ascontiguousarray(x.astype(model.operands.dtype)).view(np.uint8) for x in (a, b))
    return a, b, np.ascontiguousarray(c, np.float32)


def predicted(name: str, inputs: Problems) -> NDArray[np.uint32]:
    """The encodings of D [T, 128, 128] that the model gives for `problems`."""
    import ml_dtypes  # noqa: F401  (names bfloat16 to numpy)

    instruction = INSTRUCTIONS[name]
    a, b = (x.view(np.dtype(instruction.operand)) for x in inputs[:2])
    d = mma(a, b.swapaxes(1, 2), inputs[2], model=instruction.model)
    return np.ascontiguousarray(d).view(np.uint32)


def expected(name: str, family: str, chunk: int) -> tuple[Problems, NDArray[np.uint32]]:
    """A chunk's inputs and the model's results: the work of a process."""
    inputs = problems(name, family, chunk)
    return inputs, predicted(name, inputs)
