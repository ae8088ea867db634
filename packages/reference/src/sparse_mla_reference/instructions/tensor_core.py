"""Matrix multiply-accumulate as tensor cores do it, bit for bit.

>>> import numpy as np
>>> one, c = np.full((1, 32), 0x38, np.uint8), np.zeros((1, 1), np.float32)
>>> float(mma(one, one.T, c)[0, 0])  # 32 products of 1.0
32.0

Two paths give the same bits. ``aligned_sum`` computes an output term by term. ``exact_product``
finds the outputs for which the alignment and truncation of terms change nothing, so that a plain
matrix product gives them.

For an instruction that adds C after its sums: take a row and a column whose sizes multiply to less
than 2^24. Then every sum of their products is a float32, and no term has a bit below
2^(e_max - 23), where the alignment would cut it. Nothing rounds, and the step is one dot product.

For an instruction with C inside its sums: take sizes over all of K that multiply to less than
2^(fraction_bits + 1), and a C that is zero or a multiple of the same unit. The alignment still cuts
nothing, and only the truncation of each sum's result remains.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats.minifloat import Format
from sparse_mla_reference.instructions import float32
from sparse_mla_reference.instructions.aligned_sum import Operand, aligned_sum, truncate
from sparse_mla_reference.instructions.exact_product import Pairs, Sizes, pairs_above, product
from sparse_mla_reference.instructions.mma_models import (
    MODELS,
    SM80_BF16,
    SM80_F16,
    SM89_E4M3,
    SM90_BF16,
    SM90_E4M3,
    SM90_F16,
    SM90_WGMMA_E4M3,
    SM90_WGMMA_F16,
    SM100_BF16,
    SM100_E4M3,
    SM100_F16,
    SM100_TCGEN05_E4M3,
    SM100_TCGEN05_F16,
    SM120_E4M3,
    SM120_F16,
    Evidence,
    Model,
)

__all__ = [
    "MODELS",
    "SM80_BF16",
    "SM80_F16",
    "SM89_E4M3",
    "SM90_BF16",
    "SM90_E4M3",
    "SM90_F16",
    "SM90_WGMMA_E4M3",
    "SM90_WGMMA_F16",
    "SM100_BF16",
    "SM100_E4M3",
    "SM100_F16",
    "SM100_TCGEN05_E4M3",
    "SM100_TCGEN05_F16",
    "SM120_E4M3",
    "SM120_F16",
    "Evidence",
    "Model",
    "mma",
]

# Outputs handled at a time: long enough for numpy's loops, short enough for a core's cache.
_TILE = 1 << 16
# Integers below this are float32s.
_EXACT = 2.0**24
# What a format's encodings may come as, in the machine's byte order.
_DTYPES = {
    "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)),
    "fp16": (np.dtype(np.float16),),
    "bf16": (np.dtype(ml_dtypes.bfloat16),),
}


@np.errstate(all="ignore")
def mma(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], *, model: Model = SM90_E4M3
) -> NDArray[np.float32]:
    """D = A x B + C by successive instructions along K, batched.

    Args:
        a: [..., M, K] operands: bytes (uint8 or float8_e4m3fn) for an E4M3 model, float16 or
            bfloat16 for the others. K is a multiple of ``model.step``.
        b: [..., K, N] likewise.
        c: [..., M, N] float32 accumulators.
        model: the instruction.

    Returns:
        [..., M, N] float32, batch dimensions broadcast. Any NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an operand's dtype or byte order doesn't suit the model, ``c`` is not float32,
            or ``model`` is not a ``Model``.
        ValueError: shapes don't fit together, or K is not a multiple of the model's step.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"model must be a Model (one of {', '.join(MODELS)} of tensor_core), got {model!r}"
        )
    a = _encodings("a", a, model.operands)
    b = _encodings("b", b, model.operands)
    c = float32.as_float32("c", c)
    batch = _check_shapes(a, b, c, model)
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    count = math.prod(batch)
    left = _Blocks.of(np.broadcast_to(a, (*batch, m, k)).reshape(count, m, k), model)
    columns = np.broadcast_to(b, (*batch, k, n)).reshape(count, k, n).swapaxes(1, 2)
    right = _Blocks.of(columns, model)
    d = np.broadcast_to(c, (*batch, m, n)).reshape(count, m, n).copy()
    chain = _chain_inside if model.accumulator_inside else _chain_after
    for group, rows in _tiles(count, m, n):
        part = (slice(None), group, rows)
        d[group, rows] = chain(left[part], right[:, group], d[group, rows], model)
    return float32.canonical(d.reshape(*batch, m, n))


def _tiles(count: int, m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of M, with about ``_TILE`` outputs each."""
    rows = max(1, min(m, _TILE // max(1, n)))
    group = max(1, _TILE // max(1, rows * n))
    for i in range(0, count, group):
        for j in range(0, m, rows):
            yield slice(i, i + group), slice(j, j + rows)


@dataclass(frozen=True)
class _Blocks:
    """Rows of A, or columns of B, in blocks along K: one sum where C is inside, else one step.

    Attributes:
        operand: [S, T, k, X]; within a step the columns are in the order of the model's sums.
        sizes: [S, T, X] of the blocks' vectors.
    """

    operand: Operand
    sizes: Sizes

    @classmethod
    def of(cls, code: NDArray[Any], model: Model) -> "_Blocks":
        """Divide encodings [T, X, K]."""
        t, x, k = code.shape
        order = np.concatenate([np.array(columns) for columns in model.sums])
        width = len(model.sums[0]) if model.accumulator_inside else model.step
        steps = code.reshape(t, x, k // model.step, model.step)[..., order]
        steps = steps.reshape(t, x, k // width, width)
        blocks = np.ascontiguousarray(steps.transpose(2, 0, 3, 1))
        return cls(Operand.of(blocks, model), Sizes.of(blocks, model))

    def __getitem__(self, index: tuple[Any, ...]) -> "_Blocks":
        """Blocks, batch items and, if given, vectors."""
        operand = self.operand[(*index[:2], slice(None), *index[2:])]
        return _Blocks(operand, self.sizes[index])

    def pick(self, items: NDArray[np.int64], vectors: NDArray[np.int64]) -> "_Blocks":
        """All blocks of some vectors of some batch items."""
        return self[:, items][:, :, vectors]

    def __len__(self) -> int:
        return len(self.sizes.norm)


def _chain_after(
    a: _Blocks, b: _Blocks, c: NDArray[np.float32], model: Model
) -> NDArray[np.float32]:
    """D = RN(C + step), step after step: a [S, T, k, M], b [S, T, k, N], c [T, M, N]."""
    d = c
    for step in range(len(a)):
        left, right = a.operand[step], b.operand[step]
        careful = list(pairs_above(a.sizes[step].units, b.sizes[step].units, _limit(model)))
        if _area(careful) > c.size // 2:
            d = np.asarray(d + _sums(left, right, model))
            continue
        t = product(left.value, right.value)
        for items, rows, columns in careful:
            part = left[items][:, :, rows], right[items][:, :, columns]
            t[np.ix_(items, rows, columns)] = _sums(*part, model)
        d = np.asarray(d + t)
    return d


def _limit(model: Model) -> float:
    """Products of sizes below this need no care (the module's docstring); 0 if every one does."""
    if model.accumulator_inside:
        return 2.0 ** (model.fraction_bits + 1)
    return _EXACT if min(model.fraction_bits, model.output_bits) >= 23 else 0.0


def _area(pairs: list[Pairs]) -> int:
    return sum(len(items) * len(rows) * len(columns) for items, rows, columns in pairs)


def _sums(a: Operand, b: Operand, model: Model) -> NDArray[np.float32]:
    """The chained sums of one step, without an accumulator: a [T, k, M], b [T, k, N]."""
    start, t = 0, None
    for columns in model.sums:
        part = slice(start, start + len(columns))
        t = aligned_sum(a[:, part], b[:, part], t, model)
        start = part.stop
    assert t is not None
    return t


def _chain_inside(
    a: _Blocks, b: _Blocks, c: NDArray[np.float32], model: Model
) -> NDArray[np.float32]:
    """D = sum(products, C), sum after sum; shapes as above."""
    left, right = a.sizes.joined(), b.sizes.joined()
    careful = list(pairs_above(left.units, right.units, _limit(model)))
    careful += _unaligned(left, right, c, _limit(model))
    if _area(careful) > c.size // 2:
        return _aligned_chain(a, b, c, model)
    d = _exact_chain(a, b, c, model)
    for items, rows, columns in careful:
        part = np.ix_(items, rows, columns)
        d[part] = _aligned_chain(a.pick(items, rows), b.pick(items, columns), c[part], model)
    return d


def _unaligned(left: Sizes, right: Sizes, c: NDArray[np.float32], limit: float) -> list[Pairs]:
    """The batch items, rows and columns of a C that is not a multiple of its products' unit."""
    if not c.any():
        return []
    unit = np.ldexp(1.0, left.low_bit[:, :, None] + right.low_bit[:, None, :])
    units = np.abs(c / unit)
    most = left.units[:, :, None] * right.units[:, None, :]
    multiple = (units >= 1) & (units == np.trunc(units))
    bad = (c != 0) & ~(multiple & (units + most < limit))
    items = np.flatnonzero(bad.any(axis=(1, 2)))
    if not items.size:
        return []
    rows, columns = (np.flatnonzero(bad.any(axis=axes)) for axes in ((0, 2), (0, 1)))
    return [(items, rows, columns)]


def _exact_chain(
    a: _Blocks, b: _Blocks, c: NDArray[np.float32], model: Model
) -> NDArray[np.float32]:
    """The chain where alignment cuts nothing: exact sums, each truncated."""
    d = c
    for block in range(len(a)):
        left, right = a.operand[block].value, b.operand[block].value
        sizes = (x.sizes[block].units.max(initial=0) for x in (a, b))
        if math.prod(sizes) >= _EXACT:  # not every partial sum is a float32
            left, right = left.astype(np.float64), right.astype(np.float64)
        total = product(left, right).astype(np.float64)
        total += d
        d = truncate(total, model.output_bits, subnormal=False)
    return d


def _aligned_chain(
    a: _Blocks, b: _Blocks, c: NDArray[np.float32], model: Model
) -> NDArray[np.float32]:
    """The chain term by term."""
    d = c
    for block in range(len(a)):
        d = aligned_sum(a.operand[block], b.operand[block], d, model)
    return d


def _encodings(name: str, x: NDArray[Any], form: Format) -> NDArray[Any]:
    """``x`` viewed as encodings of ``form``."""
    x = np.asarray(x)
    allowed = _DTYPES[form.name]
    if x.dtype not in allowed:
        names = " or ".join(dtype.name for dtype in allowed)
        raise TypeError(f"{name} must be {names} in native byte order, got {x.dtype}")
    return x.view(form.dtype)


def _check_shapes(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], model: Model
) -> tuple[int, ...]:
    """Check a [..., M, K], b [..., K, N], c [..., M, N]; return the broadcast batch shape."""
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {x.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a and b must share K, got a {a.shape} and b {b.shape}")
    if a.shape[-1] % model.step:
        raise ValueError(f"K must be a multiple of {model.step} ({model.name}), got {a.shape[-1]}")
    if c.shape[-2:] != (a.shape[-2], b.shape[-1]):
        raise ValueError(f"c must be [..., {a.shape[-2]}, {b.shape[-1]}], got {c.shape}")
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    except ValueError as error:
        raise ValueError(
            "a, b and c must have batch dimensions that broadcast, "
            f"got a {a.shape}, b {b.shape}, c {c.shape}"
        ) from error
