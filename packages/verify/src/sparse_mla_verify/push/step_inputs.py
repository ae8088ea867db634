"""Inputs of one step of D ranks, with fixed seeds, and the outputs that the reference predicts.

Cache rows that no list names hold NaN.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import dcp_step, e4m3
from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    LATENT,
    NAN_BYTE,
    ROPE,
)
from sparse_mla_verify.processes.workers import spread

SEED = 2027
BATCH, WIDTH = 5, 16
CACHE_ROWS = 96
CYCLE, CYCLE_KEYS = 7, 6  # distinct steps of a run on one GPU, odd so that each meets both parities
GROUP_KEYS = 12  # keys a row, at the most, of the steps between GPUs
SCALE = float(np.float32(np.log2(np.e) / np.sqrt(COLUMNS)))

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True, eq=False)
class StepCase:
    """One step's arguments, an entry a rank.

    query `[batch, owner_heads, 576]` and kv `[N, 576]` are E4M3 bytes, rows `[batch, width]` and
    valid `[batch]` int32; the scales are exact float32 values.
    """

    name: str
    query: Arrays
    kv: Arrays
    rows: Arrays
    valid: Arrays
    scale_log2: float = SCALE
    out_scale: float = 1.0

    @property
    def ranks(self) -> int:
        """Ranks D."""
        return len(self.query)


@dataclass(frozen=True, eq=False)
class StepBits:
    """A step's results as encodings, an entry a rank along the first axis.

    latent `[D, batch, owner_heads, 512]` uint16, lse `[D, batch, owner_heads]` uint32, dropped
    `[D, D]` int32 (owner, sender).
    """

    latent: NDArray[np.uint16]
    lse: NDArray[np.uint32]
    dropped: NDArray[np.int32]


def step_digest(step: StepBits) -> str:
    """SHA-256, in hex, of what a step gives: latents, then LSEs, little-endian."""
    found = hashlib.sha256()
    for x in (step.latent, step.lse):
        found.update(np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()


def joined(digests: Iterable[str]) -> str:
    """The digest of several steps, from those of each in order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def predict_step(case: StepCase) -> StepBits:
    """The simulated step's bits."""
    out = dcp_step(
        case.query,
        case.kv,
        case.rows,
        case.valid,
        scale_log2=case.scale_log2,
        out_scale=case.out_scale,
    )
    return StepBits(out.latent.view(np.uint16), out.lse.view(np.uint32), out.dropped)


def predict_steps(cases: Sequence[StepCase], workers: int) -> list[StepBits]:
    """The same for many cases, over processes."""
    found = dict(spread(predict_step, [(case,) for case in cases], workers))
    return [found[k] for k in range(len(cases))]


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng([SEED, zlib.crc32(name.encode())])


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    return e4m3.encode(rng.normal(size=shape).astype(np.float32))


def drawn(
    name: str,
    ranks: int,
    owner_heads: int,
    *,
    batch: int = BATCH,
    width: int = WIDTH,
    most: int | None = None,
    empty: float = 0.25,
) -> StepCase:
    """A step of normal data. A row has no key on a rank with probability `empty`.

    The last row has no key on any rank, and the row before it has keys on only one rank. Some ids
    are outside the cache. A rank has at most `most` keys for a row (`width` if left out).
    """
    rng = _rng(f"{name} {ranks} {owner_heads}")
    query = [_normal(rng, batch, owner_heads, COLUMNS) for _ in range(ranks)]
    counts = rng.integers(1, (most or width) + 1, (ranks, batch))
    counts[rng.random(counts.shape) < empty] = 0
    if batch > 1:
        counts[:, -1] = 0
    if batch > 2:
        survivor = rng.integers(ranks)
        counts[:, -2] = np.where(np.arange(ranks) == survivor, 1 + rng.integers(width), 0)
    kv, rows, valid = [], [], []
    for r in range(ranks):
        ids = rng.integers(0, CACHE_ROWS - 8, (batch, width))
        ids[rng.random(ids.shape) < 0.05] = -1
        kv.append(_live_cache(rng, ids, counts[r]))
        rows.append(ids.astype(np.int32))
        valid.append(counts[r].astype(np.int32))
    return StepCase(name, tuple(query), tuple(kv), tuple(rows), tuple(valid))


def _live_cache(
    rng: np.random.Generator, ids: NDArray[Any], counts: NDArray[Any]
) -> NDArray[np.uint8]:
    """Cache rows of normal data where a list names them, of NaN elsewhere."""
    kv = np.full((CACHE_ROWS, COLUMNS), NAN_BYTE, np.uint8)
    named = [i for row, n in zip(ids, counts, strict=True) for i in row[:n] if i >= 0]
    live = np.unique(np.array(named, np.int64))
    kv[live] = _normal(rng, len(live), COLUMNS)
    return kv


def cycle(
    count: int,
    ranks: int,
    owner_heads: int,
    *,
    batch: int = BATCH,
    width: int = WIDTH,
    most: int | None = None,
) -> list[StepCase]:
    """`count` steps of normal data, no two alike."""
    sizes = {"batch": batch, "width": width, "most": most or width}
    return [drawn(f"step {k}", ranks, owner_heads, **sizes) for k in range(count)]


# ---- payloads and LSEs at the edges -------------------------------------------------------------

_Builder = Callable[[int, int], StepCase]
_SPECIAL: list[_Builder] = []


def _special(builder: _Builder) -> _Builder:
    _SPECIAL.append(builder)
    return builder


def special(ranks: int, owner_heads: int) -> Iterator[StepCase]:
    """Every special step for a group: its name says what its payloads or LSEs are."""
    for builder in _SPECIAL:
        case = builder(ranks, owner_heads)
        yield replace(case, name=builder.__name__.lstrip("_").replace("_", "-"))


def _constant_value(ranks: int, owner_heads: int, value: float, out_scale: float) -> StepCase:
    """Every key's V is `value` in even columns and `-value` in odd ones.

    The query is zero, so that all weights are equal and quantise exactly: a row is V itself.
    """
    case = drawn(f"value {value}", ranks, owner_heads)
    v = np.where(np.arange(LATENT) % 2, -value, value).astype(np.float32)
    kv = []
    for cache in case.kv:
        changed = cache.copy()
        live = np.flatnonzero(cache[:, 0] != NAN_BYTE)
        changed[live, :LATENT] = e4m3.encode(v)
        kv.append(changed)
    query = tuple(np.zeros_like(q) for q in case.query)
    return replace(case, query=query, kv=tuple(kv), out_scale=out_scale)


@_special
def negative_subnormals(ranks: int, owner_heads: int) -> StepCase:
    """Rows of -+ 2^-130, eight units of BF16's subnormals."""
    return _constant_value(ranks, owner_heads, -1.0, 2.0**-130)


@_special
def negative_zeros(ranks: int, owner_heads: int) -> StepCase:
    """Rows of -+ 2^-140, which BF16 rounds to zeros of both signs."""
    return _constant_value(ranks, owner_heads, -1.0, 2.0**-140)


@_special
def largest_payload(ranks: int, owner_heads: int) -> StepCase:
    """Rows of the largest finite BF16, 0x7F7F, of both signs."""
    return _constant_value(ranks, owner_heads, 448.0, (2 - 2.0**-7) / 1.75 * 2.0**119)


@_special
def infinite_payload(ranks: int, owner_heads: int) -> StepCase:
    """Rows that overflow BF16: infinities of both signs are sent, and merged."""
    return _constant_value(ranks, owner_heads, 448.0, 3.0e38)


@_special
def lse_far_below(ranks: int, owner_heads: int) -> StepCase:
    """Every logit is -66854.859."""
    case = drawn("far below", ranks, owner_heads)
    query = np.zeros((BATCH, owner_heads, COLUMNS), np.float32)
    query[..., LATENT] = 1.0
    kv = []
    for cache in case.kv:
        changed = cache.copy()
        live = np.flatnonzero(cache[:, 0] != NAN_BYTE)
        changed[live, LATENT:] = e4m3.encode(np.eye(1, ROPE, dtype=np.float32)[0] * -448)
        kv.append(changed)
    scale = float(np.float32(66854.859) / np.float32(448.0))
    return replace(case, query=(e4m3.encode(query),) * ranks, kv=tuple(kv), scale_log2=scale)


@_special
def one_rank_only(ranks: int, owner_heads: int) -> StepCase:
    """Row b has keys on rank b mod D alone."""
    case = drawn("one rank only", ranks, owner_heads, empty=0.0)
    valid = [
        np.where(np.arange(BATCH) % ranks == r, 1 + np.arange(BATCH) % WIDTH, 0).astype(np.int32)
        for r in range(ranks)
    ]
    return _refilled(case, valid)


@_special
def all_empty(ranks: int, owner_heads: int) -> StepCase:
    """No row has a key: count 0, or every id outside the cache."""
    case = drawn("all empty", ranks, owner_heads)
    outside = np.full((BATCH, WIDTH), -1, np.int32)
    outside[:, ::2] = CACHE_ROWS
    valid = [
        np.where(np.arange(BATCH) % 2, 0, WIDTH - r % 3).astype(np.int32) for r in range(ranks)
    ]
    return replace(case, rows=(outside,) * ranks, valid=tuple(valid))


@_special
def nan_in_a_key(ranks: int, owner_heads: int) -> StepCase:
    """Row 0 of rank 0 and row 1 of the last rank have a NaN key: dropped and counted."""
    case = drawn("nan key", ranks, owner_heads, empty=0.0)
    kv = [cache.copy() for cache in case.kv]
    for r, row in ((0, 0), (ranks - 1, 1)):
        ids = case.rows[r][row, : case.valid[r][row]]
        kv[r][ids[ids >= 0][:1], 17] = NAN_BYTE
    return replace(case, kv=tuple(kv))


@_special
def nan_in_a_query(ranks: int, owner_heads: int) -> StepCase:
    """One head of rank 1 holds the byte 0xFF, another 0x7F: every rank drops those heads."""
    case = drawn("nan query", ranks, owner_heads, empty=0.0)
    query = [q.copy() for q in case.query]
    query[1][0, 0, 575] = 0xFF
    query[1][1, owner_heads - 1, 3] = NAN_BYTE
    return replace(case, query=tuple(query))


@_special
def negative_nan_words(ranks: int, owner_heads: int) -> StepCase:
    """Whole query rows of 0xFF, which would be nothing but sentinels."""
    case = drawn("ff query", ranks, owner_heads, empty=0.0)
    query = [q.copy() for q in case.query]
    query[0][:, 0] = 0xFF
    return replace(case, query=tuple(query))


@_special
def infinite_logits(ranks: int, owner_heads: int) -> StepCase:
    """Logits that overflow float32: rows are NaN or infinite, dropped and counted."""
    return replace(drawn("infinite logits", ranks, owner_heads), scale_log2=3.0e38)


@_special
def ranks_far_apart(ranks: int, owner_heads: int) -> StepCase:
    """LSEs hundreds of powers of two apart: most weights underflow to 0."""
    return replace(drawn("far apart", ranks, owner_heads), scale_log2=SCALE * 64)


def _refilled(case: StepCase, valid: list[NDArray[np.int32]]) -> StepCase:
    """The case with other counts, and a cache that is live where they reach."""
    rng = _rng(f"{case.name} refilled")
    kv = [_live_cache(rng, ids, n) for ids, n in zip(case.rows, valid, strict=True)]
    return replace(case, kv=tuple(kv), valid=tuple(valid))
