"""Decode with its arithmetic altered: the reference's stages, each rounding a choice.

With nothing altered this is `sparse_mla_reference.decode`, bit for bit (a test holds it to that).
An `Alteration` is one way in which a kernel may differ from the contract; a set of stages says
which round at all, so that an error can be attributed one rounding at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import bf16, e4m3, e5m2, float32, minifloat, tensor_core
from sparse_mla_reference.instructions.mma_models import SM90_BF16, SM90_F16, SM90_WGMMA_E4M3, Model
from sparse_mla_reference.logits import logits
from sparse_mla_reference.lse import LN_2
from sparse_mla_reference.machine import Gpu, Ideal, Machine, Real
from sparse_mla_reference.schedule import LATENT, Schedule
from sparse_mla_reference.softmax import ordered_sum
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

PFormat = Literal["e4m3", "e5m2", "fp16", "bf16", "fp32"]


@dataclass(frozen=True)
class Alteration:
    """How a decode differs from the contract; the defaults are the contract.

    Attributes:
        p_format: the type of P as an operand of PV.
        p_rounding: how P is rounded to it; `"stochastic"` is one draw of a fixed seed.
        p_saturates: whether P past the largest finite value becomes that value, or NaN.
        p_scale: P at the max.
        p_max: whose max that is: of the chunks so far (`"running"`), of all of the CTA's keys, of
            all of the row's; or, not a max, the row's LSE, so that P is normalised at once.
        summed: the row sum is of P before or after its rounding.
        logits: what QK is rounded to before the scale.
        mma: the tensor core: the machine's, Hopper's native FP8 (13 fraction bits), or exact.
        partials: the type of the accumulators that are merged.
        out: roundings of the output: one to BF16; one before `out_scale` and one after; one toward
            zero.
        lse_base: of the LSE that is written.
        empty_lse: the LSE of a row without keys.
        empty_row: its latents.
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

    def operand(self, code: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes, as they are: other stages may round."""
        return code

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


@dataclass(frozen=True)
class _Parts(Exact):
    """A machine whose product, sums and multiply are those of different stages."""

    product: Machine = EXACT
    sums: Machine = EXACT
    multiply: Machine = EXACT

    @property
    def step(self) -> int:
        """That of the product."""
        return self.product.step

    def mma(self, a: NDArray[Any], b: NDArray[Any], c: Real) -> Real:
        """The product's."""
        return self.product.mma(a, b, c)

    def add(self, a: Real, b: Real) -> Real:
        """The sums'."""
        return self.sums.add(a, b)

    def mul(self, a: Real, b: Real) -> Real:
        """The multiply's."""
        return self.multiply.mul(a, b)


class _State(NamedTuple):
    max: Real
    sum: Real
    acc: Real


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
            raise ValueError(f"stages: {sorted(unknown)} are none of {list(STAGES)}")
        base = self.machine.multiplying(self.schedule.mma)
        if not isinstance(base, Gpu):
            raise TypeError(f"machine must be a GPU, got {base.name}; stages say what rounds")
        model = SM90_WGMMA_E4M3 if self.alteration.mma == "13 bits" else base.model
        exact = self.alteration.mma == "exact"
        gpu = Rounding(base.name, model, base.f16_model, exact_mma=exact)
        object.__setattr__(self, "_gpu", gpu)

    def decode(self, case: Case) -> tuple[NDArray[Any], NDArray[Any]]:
        """Latent `[batch, heads, 512]` and lse `[batch, heads]` of a case."""
        rows = [self._row(case, b) for b in range(case.batch)]
        return np.stack([latent for latent, _ in rows]), np.stack([lse for _, lse in rows])

    def bits(self, case: Case) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """`decode` as encodings; all stages must round."""
        latent, lse = self.decode(case)
        return bits_of(latent), bits_of(lse)

    def _at(self, stage: str) -> Machine:
        return self._gpu if stage in self.stages else EXACT

    def _row(self, case: Case, b: int) -> tuple[NDArray[Any], NDArray[Any]]:
        ids = case.rows[b, : case.counts[b]].astype(np.int64)[
            self.schedule.order(int(case.counts[b]))
        ]
        used = (ids >= 0) & (ids < len(case.kv))
        if self.alteration.invalid == "row 0":
            ids, used = np.where(used, ids, 0), np.ones_like(used)
        keys = np.zeros((len(ids), case.kv.shape[1]), np.uint8)
        keys[used] = case.kv[ids[used]]
        query = case.query[b, : case.heads]
        s = self._logits(query, keys, np.float32(case.scale_log2))
        row_max = _max(s, used)
        if self.alteration.p_max == "lse":
            row_max = _log2_sum(s, used, row_max)
        partials = [
            self._partial(s[:, part], keys[part], used[part], row_max)
            for part in self.schedule.parts(len(keys))
        ]
        return self._merge(partials, np.array(case.out_scale, np.float32))

    def _logits(self, query: Any, keys: Any, scale: np.float32) -> Real:
        machine = _Parts(
            product=self._at("qk"), sums=self._at("chains"), multiply=self._at("logit")
        )
        if self.alteration.logits == "fp32":
            return logits(query, keys, scale, self.schedule, machine)
        products = logits(query, keys, np.float32(1), self.schedule, machine)
        form = minifloat.BF16 if self.alteration.logits == "bf16" else minifloat.FP16
        rounded = minifloat.decode(minifloat.encode(products, form), form)
        return machine.mul(rounded, np.array(scale))

    def _partial(self, s: Real, keys: Any, used: Any, row_max: Real) -> _State:
        heads = len(s)
        top = np.full(heads, -np.inf, s.dtype)
        if self.alteration.p_max != "running":
            top = _max(s, used) if self.alteration.p_max == "cta" else row_max
        state = _State(top, np.zeros(heads, np.float32), np.zeros((heads, LATENT), np.float32))
        for chunk in self.schedule.chunks(len(keys)):
            state = self._chunk(state, s[:, chunk], keys[chunk], used[chunk])
        return state

    def _chunk(self, state: _State, s: Real, keys: Any, used: Any) -> _State:
        exp, summing, rescaling, pv = map(self._at, ("exp", "sum", "rescale", "pv"))
        top = np.fmax(state.max, _max(s, used))
        alpha = exp.ex2(exp.sub(state.max, top))
        alpha = np.where(state.max == -np.inf, alpha.dtype.type(1), alpha)
        bias = exp.sub(top, exp.constant(np.log2(self.alteration.p_scale)))
        p = exp.ex2(exp.sub(s, bias[:, None]))
        p = np.where(used, p, p.dtype.type(0))
        operand = self._quantise(p)
        summed = p if self.alteration.summed == "p" else _values(operand).astype(p.dtype)
        total = summing.fma(state.sum, alpha, ordered_sum(summed, self.schedule, summing))
        acc = rescaling.mul(state.acc, alpha[:, None])
        absent = -len(keys) % max(self.schedule.pv_keys, self._gpu.step)
        a = np.pad(operand, [(0, 0), (0, absent)])
        v = np.pad(keys[:, :LATENT], [(0, absent), (0, 0)])
        return _State(top, total, pv.mma(a, v, acc))

    def _quantise(self, p: Real) -> NDArray[Any]:
        """P as an operand; `p` itself where the stage doesn't round."""
        form, rounding = self.alteration.p_format, self.alteration.p_rounding
        if "quantise" not in self.stages:
            return p
        if form == "fp32":
            return _narrow(p)
        if form == "bf16":
            return bf16.encode(p)
        if form == "fp16":
            return minifloat.encode(p, minifloat.FP16).view(np.float16)
        if form == "e5m2":
            return e5m2.decode(e5m2.encode(p)).astype(np.float16)  # exact
        if rounding == "stochastic":
            return _stochastic(p)
        return e4m3.encode(p, rounding=rounding, saturate=self.alteration.p_saturates)

    def _merge(self, partials: list[_State], out_scale: Real) -> tuple[Any, Any]:
        merging, last = self._at("merge"), self._at("normalise")
        top = np.fmax.reduce([p.max for p in partials])
        total: Real = np.zeros(len(top), np.float32)
        row: Real = np.zeros(partials[0].acc.shape, np.float32)
        for p in partials:
            weight = merging.ex2(merging.sub(p.max, top))
            weight = np.where(p.sum == 0, weight.dtype.type(0), weight)
            acc = bf16.decode(bf16.encode(p.acc)) if self.alteration.partials == "bf16" else p.acc
            total = merging.fma(weight, p.sum, total)
            row = merging.fma(weight[:, None], acc, row)
        if self.alteration.out == "twice":
            once = last.mul(row, last.div(np.ones(1, np.float32), total)[:, None])
            scaled = last.mul(bf16.decode(bf16.encode(once)), out_scale)
        else:
            scaled = last.mul(row, last.div(out_scale, total)[:, None])
        empty = total == 0
        latent = np.where(empty[:, None], scaled.dtype.type(self.alteration.empty_row), scaled)
        return self._round_out(latent), self._lse(top, total, empty)

    def _round_out(self, latent: Real) -> NDArray[Any]:
        if "out" not in self.stages:
            return latent
        return bf16.encode(latent, rounding="rz" if self.alteration.out == "rz" else "rn")

    def _lse(self, top: Real, total: Real, empty: Any) -> Real:
        at = self._at("lse")
        scale = at.constant(np.log2(self.alteration.p_scale))
        lse = at.add(at.sub(top, scale), at.log2(total))
        lse = np.where(empty, lse.dtype.type(-np.inf), lse)
        if self.alteration.lse_base == "e":
            lse = at.mul(lse, at.constant(LN_2))
        return np.where(empty, lse.dtype.type(self.alteration.empty_lse), lse)


def _max(s: Real, used: NDArray[np.bool_]) -> Real:
    """Each head's max over the keys that are used; NaN is passed over, -inf without any."""
    lowest = s.dtype.type(-np.inf)
    return np.asarray(np.fmax.reduce(np.where(used, s, lowest), axis=1, initial=lowest))


def _log2_sum(s: Real, used: NDArray[np.bool_], top: Real) -> Real:
    """Each head's base-2 LSE."""
    with np.errstate(all="ignore"):
        p = np.where(used, np.exp2(_wide(s) - _wide(top)[:, None]), 0)
        return np.asarray(top + np.log2(p.sum(axis=1)), s.dtype)


def _values(operand: NDArray[Any]) -> NDArray[np.float64]:
    return _wide(operand) if operand.dtype == np.uint8 else operand.astype(np.float64)


def _stochastic(p: Real) -> NDArray[np.uint8]:
    """E4M3 below or above p, the nearer the likelier; one draw of a fixed seed."""
    below = e4m3.encode(p, rounding="rz")
    above = np.minimum(below, 0x7D) + np.uint8(1)
    low, high = _wide(below), _wide(above)
    draw = np.random.default_rng(0).random(p.shape)
    with np.errstate(all="ignore"):
        up = (_wide(p) < e4m3.MAX) & (draw < (_wide(p) - low) / (high - low))
    return np.where(up, above, below)
