"""Machines: the arithmetic that a decode runs on.

A machine is the handful of operations in which GPUs differ from each other and from real numbers.
``decode`` and its parts are written once, over these operations. ``SM90`` and its kin compute in
float32 as the GPU does. ``IDEAL`` computes in float64 and rounds nothing, so that the difference of
the two is the kernel's rounding error and nothing else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import bf16, e4m3
from sparse_mla_reference.instructions import float32, mufu, tensor_core
from sparse_mla_reference.instructions.fma import fma
from sparse_mla_reference.instructions.libdevice import log2f
from sparse_mla_reference.instructions.mma_models import (
    SM90_E4M3,
    SM90_E4M3_AS_F16,
    SM100_E4M3,
    SM100_E4M3_AS_F16,
    SM120_E4M3,
    SM120_E4M3_AS_F16,
    Model,
)

Real = NDArray[Any]  # float32 on a GPU, float64 on IDEAL


class Machine(ABC):
    """Arithmetic on arrays of ``real`` dtype."""

    name: str
    real: type[np.floating[Any]]

    @abstractmethod
    def operand(self, code: NDArray[np.uint8]) -> NDArray[Any]:
        """E4M3 bytes as an operand of ``mma``."""

    @abstractmethod
    def quantise(self, p: Real) -> NDArray[Any]:
        """Softmax numerators as an operand of ``mma``."""

    @abstractmethod
    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """a [..., M, K] x b [..., K, N] + c [..., M, N]."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Columns K of one ``mma`` instruction."""

    def multiplying(self, mma: str) -> "Machine":
        """The machine whose ``mma`` is the one that a schedule names (``Schedule.mma``)."""
        return self

    @abstractmethod
    def add(self, a: Real, b: Real) -> Real:
        """a + b."""

    def sub(self, a: Real, b: Real) -> Real:
        """a - b."""
        return self.add(a, np.negative(b))

    @abstractmethod
    def mul(self, a: Real, b: Real) -> Real:
        """a * b."""

    @abstractmethod
    def div(self, a: Real, b: Real) -> Real:
        """a / b."""

    @abstractmethod
    def fma(self, a: Real, b: Real, c: Real) -> Real:
        """a * b + c, rounded once."""

    @abstractmethod
    def ex2(self, x: Real) -> Real:
        """2^x."""

    @abstractmethod
    def log2(self, x: Real) -> Real:
        """Base-2 logarithm."""

    @abstractmethod
    def round_out(self, x: Real) -> NDArray[Any]:
        """The final rounding of a latent row."""

    def constant(self, x: float | np.floating[Any]) -> Any:
        """``x`` as a scalar of the machine."""
        return self.real(x)


@dataclass(frozen=True)
class Gpu(Machine):
    """An NVIDIA GPU: IEEE float32 with subnormals, MUFU.EX2, libdevice log2f, a tensor core.

    Attributes:
        name: the architecture.
        model: the instruction that ``mma`` is: the one that multiplies E4M3 there.
        f16_model: the FP16 instruction, fed with E4M3 operands that were converted to FP16.
    """

    name: str
    model: Model
    f16_model: Model
    real = np.float32

    def operand(self, code: NDArray[np.uint8]) -> NDArray[Any]:
        """E4M3 bytes, as they are."""
        return code

    def quantise(self, p: Real) -> NDArray[Any]:
        """``cvt.rn.satfinite.e4m3x2.f32``."""
        return e4m3.encode(p)

    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """The tensor core, instruction by instruction along K."""
        return tensor_core.mma(a, b, c, model=self.model)

    @property
    def step(self) -> int:
        """Columns K of one instruction."""
        return self.model.step

    def multiplying(self, mma: str) -> "Gpu":
        """The same GPU with ``f16_model`` in the place of ``model`` if ``mma`` is ``"f16"``."""
        return replace(self, model=self.f16_model) if mma == "f16" else self

    def add(self, a: Real, b: Real) -> Real:
        """``add.rn.f32``."""
        return float32.add(a, b)

    def mul(self, a: Real, b: Real) -> Real:
        """``mul.rn.f32``."""
        return float32.mul(a, b)

    def div(self, a: Real, b: Real) -> Real:
        """``div.rn.f32``."""
        return float32.div(a, b)

    def fma(self, a: Real, b: Real, c: Real) -> Real:
        """``fma.rn.f32``."""
        return fma(a, b, c)

    def ex2(self, x: Real) -> Real:
        """``ex2.approx.ftz.f32``."""
        return mufu.ex2(x)

    def log2(self, x: Real) -> Real:
        """libdevice ``log2f``."""
        return log2f(x)

    def round_out(self, x: Real) -> NDArray[Any]:
        """``cvt.rn.bf16.f32``."""
        return bf16.encode(x)


@dataclass(frozen=True)
class Ideal(Machine):
    """Real arithmetic, as far as float64 carries it: nothing is narrowed, P is not quantised."""

    name: str = "IDEAL"
    real = np.float64

    def operand(self, code: NDArray[np.uint8]) -> NDArray[Any]:
        """Exact values."""
        return e4m3.decode(code).astype(np.float64)

    def quantise(self, p: Real) -> NDArray[Any]:
        """``p`` itself."""
        return p

    @np.errstate(all="ignore")
    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """Matrix product and sum in float64."""
        return np.asarray(c + np.matmul(a, b))

    @property
    def step(self) -> int:
        """32, as the GPUs' instructions (of no consequence here)."""
        return 32

    @np.errstate(all="ignore")
    def add(self, a: Real, b: Real) -> Real:
        """a + b in float64."""
        return np.asarray(a + b)

    @np.errstate(all="ignore")
    def mul(self, a: Real, b: Real) -> Real:
        """a * b in float64."""
        return np.asarray(a * b)

    @np.errstate(all="ignore")
    def div(self, a: Real, b: Real) -> Real:
        """a / b in float64."""
        return np.asarray(a / b)

    @np.errstate(all="ignore")
    def fma(self, a: Real, b: Real, c: Real) -> Real:
        """a * b + c in float64."""
        return np.asarray(a * b + c)

    @np.errstate(all="ignore")
    def ex2(self, x: Real) -> Real:
        """2^x in float64."""
        return np.exp2(x)

    @np.errstate(all="ignore")
    def log2(self, x: Real) -> Real:
        """Base-2 logarithm in float64."""
        return np.log2(x)

    def round_out(self, x: Real) -> NDArray[Any]:
        """``x`` itself."""
        return x


SM90 = Gpu("SM90", SM90_E4M3, SM90_E4M3_AS_F16)
# sm_103's tensor core is not published apart; its assembler emulates E4M3 as sm_100's does.
SM100 = Gpu("SM100", SM100_E4M3, SM100_E4M3_AS_F16)
SM103 = Gpu("SM103", SM100_E4M3, SM100_E4M3_AS_F16)
SM120 = Gpu("SM120", SM120_E4M3, SM120_E4M3_AS_F16)
IDEAL = Ideal()
