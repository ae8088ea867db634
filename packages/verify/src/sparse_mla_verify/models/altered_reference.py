"""Decode with altered arithmetic: the reference with steps replaced.

An `Alteration` is one way in which a kernel may differ from the contract; each puts other functions
in the place of some of the reference's steps (`sparse_mla_reference.Steps`). A set of stages says
which steps round at all, so that an error can be attributed one rounding at a time. With nothing
altered nothing is replaced, and all steps round: the decode is the reference's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import CONTRACT as CONTRACT_STEPS
from sparse_mla_reference import (
    Steps,
    bf16,
    decode,
    e4m3,
    e5m2,
    float32,
    fp16,
    minifloat,
    tensor_core,
)
from sparse_mla_reference.instructions.mma_models import (
    SM90_BF16,
    SM90_F16,
    SM90_WGMMA_E4M3,
    Model,
)
from sparse_mla_reference.machine import Gpu, Ideal, Machine, Real
from sparse_mla_reference.merge import Sums
from sparse_mla_reference.partial import Partial
from sparse_mla_reference.schedule import Schedule
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.measure.bits import bits_of

# Where a decode rounds, in the order of the data. Each is a row or two of the arithmetic contract.
STAGES: Mapping[str, str] = MappingProxyType(
    {
        "qk": "QK products by the tensor core (R1)",
        "chains": "FP32 sum of the QK chains (R2)",
        "logit": "FP32 logit times scale (R3)",
        "exp": "FP32 exponents and EX2 (R5 to R7)",
        "sum": "FP32 sum of P (R8, R9)",
        "quantise": "P to its format (R11)",
        "rescale": "FP32 rescaling of the accumulators (R10)",
        "pv": "PV by the tensor core (R12)",
        "merge": "FP32 merge of the CTAs' partials (R13)",
        "normalise": "FP32 division and multiply (R15)",
        "lse": "FP32 log2f and the LSE (R14)",
        "out": "BF16 output (R15)",
    }
)
ALL_STAGES = frozenset(STAGES)
# The reference's steps in which each stage rounds.
STEPS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qk": ("products",),
        "chains": ("sum_of_chains",),
        "logit": ("logit",),
        "exp": ("alpha", "bias", "numerators"),
        "sum": ("chunk_sum", "running_sum"),
        "quantise": ("quantise",),
        "rescale": ("rescale",),
        "pv": ("pv",),
        "merge": ("merge_partials",),
        "normalise": ("normalise",),
        "lse": ("lse2", "natural"),
        "out": ("round_out",),
    }
)

PFormat = Literal["e4m3", "e5m2", "fp16", "bf16", "fp32"]


@dataclass(frozen=True)
class Alteration:
    """How a decode differs from the contract; the defaults are the contract.

    Attributes:
        p_format: the type of P as an operand of PV.
        p_rounding: how P is rounded to it; `"stochastic"` is one draw of a fixed seed.
        p_saturates: whether P past the largest finite value becomes that value, or NaN.
        p_scale: P of a key whose logit is the max.
        p_max: which max: that of the chunks so far (`"running"`), of all of the CTA's keys, or
            of all of the row's keys; or the row's LSE in place of a max, so that P is normalised at
            once.
        summed: whether the row sum adds P before or after its rounding.
        logits: what QK is rounded to before the scale.
        mma: the tensor core: the machine's, Hopper's native FP8 (13 fraction bits), or exact.
        partials: the type of the accumulators that are merged.
        out: roundings of the output: one to BF16; one before `out_scale` and one after; one toward
            zero.
        lse_base: the base of the LSE that is written.
        empty_lse: the LSE of a row without keys.
        empty_row: the latents of a row without keys.
        invalid: what an id outside the cache does: nothing, or attend to row 0.
    """

    p_format: PFormat = "e4m3"
    p_rounding: Literal["rn", "rz", "stochastic"] = "rn"
    p_saturates: bool = True
    p_scale: float = 448.0
    p_max: Literal["running", "cta", "row", "lse"] = "running"
    summed: Literal["p", "quantised"] = "p"
    logits: Literal["fp32", "fp16", "bf16"] = "fp32"
    mma: Literal["machine", "13 bits", "exact"] = "machine"
    partials: Literal["fp32", "bf16"] = "fp32"
    out: Literal["once", "twice", "rz"] = "once"
    lse_base: Literal["e", "2"] = "e"
    empty_lse: float = -np.inf
    empty_row: float = 0.0
    invalid: Literal["masked", "row 0"] = "masked"


CONTRACT = Alteration()


# Arithmetic that takes what it is given: a stage that rounds may follow one that doesn't.


def _wide(x: Any) -> NDArray[np.float64]:
    if getattr(x, "dtype", None) == np.uint8:
        return e4m3.decode(x).astype(np.float64)
    return np.asarray(x, np.float64)


@dataclass(frozen=True)
class Exact(Ideal):
    """`IDEAL` on operands of any type: all are widened to float64 first."""

    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """In float64."""
        return super().mma(_wide(a), _wide(b), _wide(c))

    def add(self, a: Real, b: Real) -> Real:
        """In float64."""
        return super().add(_wide(a), _wide(b))

    def mul(self, a: Real, b: Real) -> Real:
        """In float64."""
        return super().mul(_wide(a), _wide(b))

    def div(self, a: Real, b: Real) -> Real:
        """In float64."""
        return super().div(_wide(a), _wide(b))

    def fma(self, a: Real, b: Real, c: Real) -> Real:
        """In float64."""
        return super().fma(_wide(a), _wide(b), _wide(c))

    def ex2(self, x: Real) -> Real:
        """In float64."""
        return super().ex2(_wide(x))

    def log2(self, x: Real) -> Real:
        """In float64."""
        return super().log2(_wide(x))


EXACT = Exact()


def _narrow(x: Any) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return float32.canonical(np.asarray(x, np.float32))


def _is_float32(*arrays: Any) -> bool:
    return all(np.asarray(a).dtype == np.float32 for a in arrays)


@dataclass(frozen=True)
class Rounding(Gpu):
    """A GPU on operands of any type: where one is float64, the exact result is rounded once."""

    exact_mma: bool = False

    def add(self, a: Real, b: Real) -> Real:
        """FP32."""
        return super().add(a, b) if _is_float32(a, b) else _narrow(EXACT.add(a, b))

    def mul(self, a: Real, b: Real) -> Real:
        """FP32."""
        return super().mul(a, b) if _is_float32(a, b) else _narrow(EXACT.mul(a, b))

    def div(self, a: Real, b: Real) -> Real:
        """FP32."""
        return super().div(a, b) if _is_float32(a, b) else _narrow(EXACT.div(a, b))

    def fma(self, a: Real, b: Real, c: Real) -> Real:
        """FP32."""
        return super().fma(a, b, c) if _is_float32(a, b, c) else _narrow(EXACT.fma(a, b, c))

    def ex2(self, x: Real) -> Real:
        """Of x in FP32."""
        return super().ex2(_narrow(x))

    def log2(self, x: Real) -> Real:
        """Of x in FP32."""
        return super().log2(_narrow(x))

    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """The tensor core for the type of A; B is E4M3 bytes, converted if A is wider."""
        c = _narrow(c)
        if self.exact_mma or a.dtype.name in ("float32", "float64"):
            return _narrow(EXACT.mma(a, b, c))
        if a.dtype == np.uint8:
            return tensor_core.mma(a, b, c, model=self.model)
        model = SM90_BF16 if a.dtype == ml_dtypes.bfloat16 else _half(self.model)
        return tensor_core.mma(a, e4m3.decode(b).astype(a.dtype), c, model=model)


def _half(model: Model) -> Model:
    """The instruction with FP16 operands in the place of converted E4M3."""
    if model.accumulator_inside:
        return SM90_F16
    return replace(model, operands=minifloat.FP16, normalises_subnormals=False)


Step = Callable[..., Any]


def _on(machine: Machine, step: Step) -> Step:
    """A step on a machine, whichever machine the decode runs on."""
    return lambda *arguments: step(*arguments[:-1], machine)


@dataclass(frozen=True)
class Altered:
    """A decode of one schedule and machine under an alteration, rounding in some stages alone.

    A stage that doesn't round computes in float64. P is quantised in the stage `quantise`, the
    output rounded in `out`; without `out` the latents are FP32 or float64 values.
    """

    schedule: Schedule
    machine: Machine
    alteration: Alteration = CONTRACT
    stages: frozenset[str] = ALL_STAGES
    _gpu: Rounding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = self.stages - ALL_STAGES
        if unknown:
            raise ValueError(f"stages must be of {list(STAGES)}, got {sorted(unknown)}")
        base = self.machine.multiplying(self.schedule.mma)
        if not isinstance(base, Gpu):
            raise TypeError(f"machine must be a GPU, got {base.name}; stages say what rounds")
        model = SM90_WGMMA_E4M3 if self.alteration.mma == "13 bits" else base.model
        exact = self.alteration.mma == "exact"
        gpu = Rounding(base.name, model, base.f16_model, exact_mma=exact)
        object.__setattr__(self, "_gpu", gpu)

    def decode(self, case: Case) -> tuple[NDArray[Any], NDArray[Any]]:
        """Latent `[batch, heads, 512]` and lse `[batch, heads]` of a case."""
        # An instruction that takes more keys than the schedule pads to has its own zeros.
        pv_keys = max(self.schedule.pv_keys, self._gpu.step)
        return decode(
            **case.arguments,
            schedule=replace(self.schedule, pv_keys=pv_keys),
            machine=self._gpu,
            steps=self.steps(),
        )

    def bits(self, case: Case) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """`decode` as encodings; all stages must round."""
        latent, lse = self.decode(case)
        return bits_of(latent), bits_of(lse)

    def steps(self) -> Steps:
        """The contract's steps with the altered ones replaced, each on its stage's machine."""
        altered = replace(CONTRACT_STEPS, **self._replaced())
        placed = {
            name: _on(self._at(stage), getattr(altered, name))
            for stage, names in STEPS_OF.items()
            for name in names
        }
        return replace(altered, **placed)

    def _at(self, stage: str) -> Machine:
        return self._gpu if stage in self.stages else EXACT

    def _replaced(self) -> dict[str, Step]:
        """The steps that the alteration replaces."""
        a, steps = self.alteration, dict[str, Step]()
        if a.invalid == "row 0":
            steps["gather"] = _gather_row_0
        if a.logits != "fp32":
            form = minifloat.BF16 if a.logits == "bf16" else minifloat.FP16
            steps["logit"] = partial(_rounded_logit, form)
        if a.p_max != "running":
            steps["start"] = _STARTS[a.p_max]
        if a.p_scale != CONTRACT.p_scale:
            for name in ("bias", "lse2"):
                step = getattr(CONTRACT_STEPS, name)
                steps[name] = partial(step, p_scale_log2=float(np.log2(a.p_scale)))
        if (a.p_format, a.p_rounding, a.p_saturates) != ("e4m3", "rn", True):
            steps["quantise"] = partial(_quantise, a)
        if a.summed == "quantised":
            steps["chunk_sum"] = partial(_sum_of_quantised, a, self._at("quantise"))
        if a.partials == "bf16":
            steps["merge_partials"] = _merge_bf16
        if a.out == "twice" or a.empty_row != 0:
            steps["normalise"] = partial(_normalise, a)
        if a.out == "rz":
            steps["round_out"] = _truncate
        if a.lse_base == "2" or a.empty_lse != -np.inf:
            steps["natural"] = partial(_written_lse, a)
        return steps


# The steps that alterations put in the place of the contract's.


def _gather_row_0(kv: NDArray[np.uint8], ids: NDArray[np.int64]) -> tuple[Any, Any]:
    """An id outside the cache is that of its row 0."""
    return CONTRACT_STEPS.gather(kv, np.where((ids >= 0) & (ids < len(kv)), ids, 0))


def _rounded_logit(form: minifloat.Format, dots: Real, scale_log2: Any, machine: Machine) -> Real:
    rounded = minifloat.decode(minifloat.encode(dots, form), form)
    return CONTRACT_STEPS.logit(rounded, scale_log2, machine)


def _start_at(top: Callable[..., Real]) -> Step:
    """A CTA whose running max is given before its first key."""

    def start(s: Real, used: NDArray[np.bool_], part: slice, machine: Machine) -> Partial:
        return CONTRACT_STEPS.start(s, used, part, machine)._replace(max=top(s, used, part))

    return start


def _max(s: Real, used: NDArray[np.bool_]) -> Real:
    """Each head's max over the keys that are used; -inf without any."""
    return CONTRACT_STEPS.running_max(s, used, np.full(len(s), -np.inf, s.dtype))


def _log2_sum(s: Real, used: NDArray[np.bool_]) -> Real:
    """Each head's base-2 LSE."""
    top = _max(s, used)
    with np.errstate(all="ignore"):
        p = np.where(used, np.exp2(_wide(s) - _wide(top)[:, None]), 0)
        return np.asarray(top + np.log2(p.sum(axis=1)), s.dtype)


_STARTS: Mapping[str, Step] = MappingProxyType(
    {
        "cta": _start_at(lambda s, used, part: _max(s[:, part], used[part])),
        "row": _start_at(lambda s, used, part: _max(s, used)),
        "lse": _start_at(lambda s, used, part: _log2_sum(s, used)),
    }
)


def _quantise(a: Alteration, p: Real, machine: Machine) -> NDArray[Any]:
    """P as an operand; `p` itself where the stage doesn't round."""
    if machine is EXACT:
        return p
    if a.p_format == "fp32":
        return _narrow(p)
    if a.p_format == "bf16":
        return bf16.encode(p)
    if a.p_format == "fp16":
        return fp16.encode(p)
    if a.p_format == "e5m2":
        return e5m2.decode(e5m2.encode(p)).astype(np.float16)  # exact
    if a.p_rounding == "stochastic":
        return _stochastic(p)
    return e4m3.encode(p, rounding=a.p_rounding, saturate=a.p_saturates)


def _stochastic(p: Real) -> NDArray[np.uint8]:
    """E4M3 below or above p, the nearer the likelier; one draw of a fixed seed."""
    below = e4m3.encode(p, rounding="rz")
    above = np.minimum(below, 0x7D) + np.uint8(1)
    low, high = _wide(below), _wide(above)
    draw = np.random.default_rng(0).random(p.shape)
    with np.errstate(all="ignore"):
        up = (_wide(p) < e4m3.MAX) & (draw < (_wide(p) - low) / (high - low))
    return np.where(up, above, below)


def _sum_of_quantised(
    a: Alteration, quantiser: Machine, p: Real, schedule: Schedule, machine: Machine
) -> Real:
    quantised = _wide(_quantise(a, p, quantiser)).astype(p.dtype)
    return CONTRACT_STEPS.chunk_sum(quantised, schedule, machine)


def _merge_bf16(partials: list[Partial], machine: Machine) -> Sums:
    rounded = [p._replace(acc=bf16.decode(bf16.encode(p.acc))) for p in partials]
    return CONTRACT_STEPS.merge_partials(rounded, machine)


def _normalise(a: Alteration, row: Real, total: Real, out_scale: Any, machine: Machine) -> Real:
    """A row without keys is `empty_row`; rounded `"twice"`, also before the V scale."""
    if a.out == "twice":
        once = CONTRACT_STEPS.normalise(row, total, np.float32(1), machine)
        scaled = machine.mul(bf16.decode(bf16.encode(once)), out_scale)
    else:
        scaled = CONTRACT_STEPS.normalise(row, total, out_scale, machine)
    return np.where(total[:, None] == 0, scaled.dtype.type(a.empty_row), scaled)


def _truncate(row: Real, machine: Machine) -> NDArray[Any]:
    return row if machine is EXACT else bf16.encode(row, rounding="rz")


def _written_lse(a: Alteration, lse2: Real, machine: Machine) -> Real:
    lse = lse2 if a.lse_base == "2" else CONTRACT_STEPS.natural(lse2, machine)
    return np.where(np.isneginf(lse2), lse.dtype.type(a.empty_lse), lse)
