"""Log-sum-exp (LSE): of a finished row, in either base, and as each library writes it.

>>> import numpy as np
>>> ours = np.float32([0.5, -np.inf])
>>> convert(ours, SPARSE_MLA, FLASH_MLA).tolist()  # natural, +inf for a row without keys
[0.5, inf]
>>> convert(ours, SPARSE_MLA, FLASHINFER).tolist()  # base 2
[0.7213475108146667, -inf]
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.arguments import check_kind
from sparse_mla_reference.instructions.float32 import as_float32, canonical
from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.softmax import P_SCALE_LOG2

Base = Literal["2", "e"]

LN_2 = float(np.log(2.0))
# No finite logits of a sensible model reach this; a mark of unknown value may lie below.
_SUSPICIOUS = -1e6


def lse2(top: Real, total: Real, machine: Machine, *, p_scale_log2: float = P_SCALE_LOG2) -> Real:
    """Base-2 LSE of a row (R14): (top - log2 448) + log2 total; -inf for a total of 0.

    Args:
        top: [...] max of the base-2 logits, ``machine.real``.
        total: [...] sum of the numerators, each 2^p_scale_log2 = 448 for a logit of ``top``.
        machine: the arithmetic.
        p_scale_log2: log2 of the numerator of a logit of ``top``.
    """
    unscaled = machine.sub(top, machine.constant(p_scale_log2))  # R14
    return machine.add(unscaled, machine.log2(total))  # R14


def natural(lse2: Real, machine: Machine) -> Real:
    """A base-2 LSE in natural units: one multiply by ln 2 (R14)."""
    return machine.mul(lse2, machine.constant(LN_2))  # R14


@dataclass(frozen=True)
class Convention:
    """How a library writes LSEs.

    Attributes:
        name: the library.
        base: of the logarithm.
        empty: values that mean "no keys"; the first is the one it writes. None: its value isn't
            fixed, so that an empty row can't be told from a real one.
        row: what the output row of an empty row holds: ``"zero"``, ``"unwritten"`` or ``"nan"``.
    """

    name: str
    base: Base
    empty: tuple[float, ...] | None
    row: Literal["zero", "unwritten", "nan"] = "zero"


_LOWEST = (-np.inf,)
SPARSE_MLA = Convention("this project's decode", "e", _LOWEST)
MAILBOX = Convention("this project's mailbox", "2", (-3.0e38,), "unwritten")
FLASH_MLA = Convention("FlashMLA", "e", (np.inf,))
FLASH_ATTENTION_2 = Convention("FlashAttention-2", "e", (np.inf,))
FLASH_ATTENTION_3 = Convention("FlashAttention-3", "e", _LOWEST)
FLASH_ATTENTION_4 = Convention("FlashAttention-4", "e", _LOWEST)
VLLM_MERGE = Convention("vLLM merge_attn_states", "e", (-np.inf, np.inf))
FLASHINFER = Convention("FlashInfer fa2, fa3, merge_state", "2", _LOWEST)
FLASHINFER_TRTLLM_GEN = Convention("FlashInfer trtllm-gen", "2", _LOWEST, "unwritten")
FLASHINFER_SM120_SPARSE = Convention("FlashInfer SM120 sparse", "2", (-1e30,))
TILELANG_SPARSE_MLA = Convention("TileLang sparse MLA", "2", None)
AITER_MERGE = Convention("AITER merge", "e", None, "nan")

CONVENTIONS = (
    SPARSE_MLA, MAILBOX, FLASH_MLA, FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_4,
    VLLM_MERGE, FLASHINFER, FLASHINFER_TRTLLM_GEN, FLASHINFER_SM120_SPARSE, TILELANG_SPARSE_MLA,
    AITER_MERGE,
)  # fmt: skip


@np.errstate(all="ignore")
def convert(lse: NDArray[Any], source: Convention, target: Convention) -> NDArray[np.float32]:
    """LSEs of one library as another writes them.

    A change of base multiplies by ln 2 or log2 e in float64 and rounds once. NaN stays NaN, where
    the target has a fixed value for no keys. Nothing is written that ``is_empty`` would refuse to
    read in ``target``.

    Args:
        lse: float32 array, any shape.
        source: the convention of ``lse``.
        target: the convention of the result.

    Returns:
        float32 array, same shape.

    Raises:
        TypeError: ``lse`` is not float32, or ``source`` or ``target`` is no ``Convention``.
        ValueError: an element's meaning is not certain in ``source``, can't be said in ``target``,
            or is finite and leaves float32's range in the other base. The message gives the first
            such element and why.
    """
    check_kind("source", source, Convention, "such as lse.FLASH_MLA")
    check_kind("target", target, Convention, "such as lse.FLASH_MLA")
    values = as_float32("lse", lse)
    empty = is_empty(values, source)
    factor = {"2e": np.log(2.0), "e2": 1 / np.log(2.0)}.get(source.base + target.base, 1.0)
    scaled = np.asarray((values.astype(np.float64) * factor).astype(np.float32))
    lost = ~empty & np.isfinite(values) & np.isinf(scaled)
    _refuse(lost, values, f"stay in float32's range in base {target.base} ({target.name})")
    if target.empty is None:
        _refuse(empty, values, f"not mean no keys, for which {target.name} has no value")
        unclear, must = _unclear(scaled, target)
        _refuse(unclear, values, must)
        return canonical(scaled)
    marks = np.array(target.empty, np.float32)
    real = ~empty & np.isin(scaled, marks)
    _refuse(real, values, f"not become the value that means no keys to {target.name}")
    below, must = _unclear(scaled, target)
    _refuse(~empty & below, values, must)
    return canonical(np.where(empty, marks[0], scaled))


def is_empty(lse: NDArray[Any], convention: Convention) -> NDArray[np.bool_]:
    """Which rows had no keys.

    Args:
        lse: float32 array, any shape.
        convention: whose it is.

    Returns:
        bool array, same shape.

    Raises:
        TypeError: ``lse`` is not float32, or ``convention`` is no ``Convention``.
        ValueError: an element may or may not mean "no keys": below a finite mark, or any that is
            not finite or under -1e6 where the mark's value isn't fixed.
    """
    check_kind("convention", convention, Convention, "such as lse.FLASH_MLA")
    values = as_float32("lse", lse)
    unclear, must = _unclear(values, convention)
    _refuse(unclear, values, must)
    return np.isin(values, np.array(convention.empty or (), np.float32))


def _unclear(values: NDArray[np.float32], convention: Convention) -> tuple[NDArray[np.bool_], str]:
    """Which values may or may not mean "no keys" in the convention, and what they must be."""
    if convention.empty is None:
        unclear = ~np.isfinite(values) | (values < _SUSPICIOUS)
        least = f"finite and at least {_SUSPICIOUS:g}"
        return unclear, f"be {least} ({convention.name} has no fixed value for no keys)"
    mark = np.float32(convention.empty[0])
    below = np.isfinite(mark) & (values < mark)
    return below, f"not be below {convention.name}'s {mark:g}, which means no keys"


def _refuse(where: NDArray[np.bool_], values: NDArray[np.float32], must: str) -> None:
    if where.any():
        index = tuple(int(i) for i in np.argwhere(where)[0])
        raise ValueError(f"lse{list(index)} must {must}, got {values[index]:.9g}")
