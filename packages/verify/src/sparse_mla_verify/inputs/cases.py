"""Case families: named inputs with fixed seeds, each a kind of input that such kernels get wrong.

Every cache row that no list names holds NaN in all 576 columns, and so do the query's rows past
`batch` and heads past `heads`. The entries of a list past its count name such NaN rows: whatever
reads more than it should shows it.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.inputs import real_inputs
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE

SEED = 2026
LATENT, ROPE = 512, 64  # spec: K is all 576 columns, V the first 512
COLUMNS = LATENT + ROPE
HEAD_TILE = 16  # heads that one cluster computes
NAN_BYTE = 0x7F  # the canonical E4M3 NaN
MAX_E4M3 = 448.0
SPARE_ROWS = 64  # NaN cache rows between and after the named ones

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]

# The softmax scale of 576 columns, in base-2 units: unit normal q and k give logits of deviation
# log2(e).
UNIT_SCALE = float(np.float32(np.log2(np.e) / np.sqrt(COLUMNS)))


@dataclass(frozen=True, order=True)
class Signature:
    """What a kernel is compiled for, in the order of `compile_sparse`."""

    batch: int
    heads: int
    padded: int
    width: int
    cap: int
    schedule: str = BASE

    @property
    def key(self) -> str:
        """The signature as one word, as recordings name it; the base schedule is not named."""
        sizes = f"b{self.batch}-h{self.heads}-p{self.padded}-w{self.width}-c{self.cap}"
        return sizes if self.schedule == BASE else f"{sizes}-{self.schedule}"


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of one decode.

    query `[cap, padded, 576]` and kv `[N, 576]` are E4M3 bytes, rows `[batch, width]` and valid
    `[batch]` int32; the two scales are exact float32 values. The arrays are read-only. The schedule
    says how it is decoded (`schedules`) and is no input.
    """

    family: str
    name: str
    about: str
    query: Bytes
    kv: Bytes
    rows: Ints
    valid: Ints
    scale_log2: float
    out_scale: float
    heads: int
    schedule: str = BASE

    def __post_init__(self) -> None:
        for array in (self.query, self.kv, self.rows, self.valid):
            array.setflags(write=False)

    @property
    def batch(self) -> int:
        """Rows that are decoded."""
        return len(self.valid)

    @property
    def padded(self) -> int:
        """Heads that the buffers have room for."""
        return self.query.shape[1]

    @property
    def tiles(self) -> int:
        """How many (row, head-tile) results the case gives."""
        return self.batch * self.heads // HEAD_TILE

    @property
    def signature(self) -> Signature:
        """What the kernel must be compiled for."""
        cap, width = self.query.shape[0], self.rows.shape[1]
        return Signature(self.batch, self.heads, self.padded, width, cap, self.schedule)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Keys of each row, masked ones included: `valid` clamped to `[0, width]`; `[batch]`."""
        return np.clip(self.valid.astype(np.int64), 0, self.rows.shape[1])

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs as the reference's `decode` and `bounds` take them, by name.

        The query is that of the rows and heads that are decoded.
        """
        return {
            "query": self.query[: self.batch, : self.heads],
            "kv": self.kv,
            "rows": self.rows,
            "valid": self.valid,
            "scale_log2": self.scale_log2,
            "out_scale": self.out_scale,
        }

    def only(self, rows: slice | Sequence[int]) -> "Case":
        """Some of the decoded rows alone, over the same cache."""
        pick = rows if isinstance(rows, slice) else np.array(rows)
        query = self.query[: self.batch]
        return replace(self, query=query[pick], rows=self.rows[pick], valid=self.valid[pick])

    def row(self, index: int) -> "Case":
        """The same row alone: a case of batch 1 over the same cache."""
        return replace(self.only([index]), name=f"{self.name}[{index}]")

    def digest(self) -> str:
        """SHA-256 over every input: the same digest, the same case, whatever made it."""
        state = hashlib.sha256()
        scales = np.array([self.scale_log2, self.out_scale], np.float32)
        heads = np.array([self.heads], np.int32)
        for array in (self.query, self.kv, self.rows, self.valid, scales, heads):
            state.update(repr((array.shape, array.dtype.str)).encode())
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()


@dataclass(frozen=True)
class Family:
    """A named kind of input: what it holds, in words, and the function that makes its cases.

    A `pending` family is not in the recordings that ship: a run on a GPU takes it, and an audit of
    a recording if that holds it.
    """

    name: str
    about: str
    build: Callable[[], tuple[Case, ...]]
    pending: bool = False


_FAMILIES: dict[str, Family] = {}
FAMILIES = MappingProxyType(_FAMILIES)


def all_cases(
    families: Sequence[str] = (),
    schedule: str = BASE,
    *,
    pending: bool = False,
    seed: int = SEED,
) -> tuple[Case, ...]:
    """The cases of the named families, or of all, in the order of `FAMILIES`, on a schedule.

    `pending` takes in those of the families that no recording that ships holds. Another `seed` than
    the recordings' draws other numbers for the same kinds of input.

    Raises ValueError for a name that is no family or no schedule.
    """
    if schedule not in REFERENCE:
        raise ValueError(f"schedule must be one of {list(REFERENCE)}, got {schedule!r}")
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(f"families must be of {list(FAMILIES)}, got {unknown}")
    wanted = families or [f.name for f in FAMILIES.values() if pending or not f.pending]
    chosen = [FAMILIES[name] for name in FAMILIES if name in wanted]
    token = _seed.set(seed)
    try:
        return tuple(replace(c, schedule=schedule) for family in chosen for c in family.build())
    finally:
        _seed.reset(token)


_seed: ContextVar[int] = ContextVar("seed", default=SEED)


def family(build: Callable[[], Iterator[Case]]) -> Callable[[], tuple[Case, ...]]:
    """Register a generator of cases as a family of its own name, described by its docstring."""
    return _registered(build, pending=False)


def pending_family(build: Callable[[], Iterator[Case]]) -> Callable[[], tuple[Case, ...]]:
    """As `family`, of one that no recording that ships holds."""
    return _registered(build, pending=True)


def _registered(
    build: Callable[[], Iterator[Case]], pending: bool
) -> Callable[[], tuple[Case, ...]]:
    name = build.__name__.replace("_", "-")
    about = " ".join((build.__doc__ or "").split())

    def made() -> tuple[Case, ...]:
        return tuple(replace(c, family=name, name=f"{name}/{c.name}") for c in build())

    _FAMILIES[name] = Family(name, about, made, pending)
    return made


# Bytes of E4M3


def e4m3_bytes(values: Any) -> Bytes:
    """E4M3 bytes of `values`, nearest even, saturated to +-448; NaN is 0x7F. Any shape."""
    clipped = np.clip(np.asarray(values, np.float32), -MAX_E4M3, MAX_E4M3)
    out = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(clipped), np.uint8(NAN_BYTE), out)


def e4m3_values(encoded: Bytes) -> NDArray[np.float64]:
    """The exact values of E4M3 bytes, as float64. Any shape."""
    return encoded.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def exact_logits(case: Case, row: int) -> NDArray[np.float64]:
    """The logits of a row in base-2 units, in float64: `[heads, count]`; NaN for a masked id."""
    ids = case.rows[row, : case.counts[row]]
    inside = (ids >= 0) & (ids < len(case.kv))
    keys = e4m3_values(case.kv[np.where(inside, ids, 0)])
    logits = e4m3_values(case.query[row, : case.heads]) @ keys.T * case.scale_log2
    return np.where(inside, logits, np.nan)


# Putting cases together


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng([_seed.get(), zlib.crc32(name.encode())])


def _case(
    name: str,
    about: str,
    query: Bytes,
    keys: Sequence[Bytes],
    *,
    width: int,
    padded: int | None = None,
    cap: int | None = None,
    valid: Sequence[int] | None = None,
    scale_log2: float = UNIT_SCALE,
    out_scale: float = 1.0,
) -> Case:
    """A case from its queries `[batch, heads, 576]` and each row's keys `[n, 576]`.

    The keys are scattered over a cache with NaN rows between them; lists are filled up to `width`
    with NaN rows. `valid` is each list's length unless given; keys past it are NaN too.
    """
    batch, heads, _ = query.shape
    lengths = [len(k) for k in keys]
    counted = np.clip(lengths if valid is None else valid, 0, lengths)
    total = sum(lengths) + SPARE_ROWS
    places = _rng(name).permutation(total).astype(np.int32)
    spare, places = places[:SPARE_ROWS], places[SPARE_ROWS:]
    kv = np.full((total, COLUMNS), NAN_BYTE, np.uint8)
    rows = np.resize(spare, (batch, width))
    for r, (k, start) in enumerate(zip(keys, np.cumsum([0, *lengths]), strict=False)):
        ids = places[start : start + len(k)]
        kv[ids[: counted[r]]] = k[: counted[r]]
        rows[r, : len(k)] = ids
    mailbox = np.full((cap or batch, padded or heads, COLUMNS), NAN_BYTE, np.uint8)
    mailbox[:batch, :heads] = query
    return Case(
        family="",
        name=name,
        about=about,
        query=mailbox,
        kv=kv,
        rows=rows,
        valid=np.array(lengths if valid is None else valid, np.int32),
        scale_log2=float(np.float32(scale_log2)),
        out_scale=float(np.float32(out_scale)),
        heads=heads,
    )


Sampler = Callable[[np.random.Generator, tuple[int, ...]], Bytes]


def _drawn(
    name: str,
    about: str,
    sampler: Sampler,
    batch: int,
    heads: int,
    counts: Sequence[int],
    **rest: Any,
) -> Case:
    """A case whose every query and key is drawn from one distribution."""
    rng = _rng(f"{sampler.__name__} {name}")
    query = sampler(rng, (batch, heads, COLUMNS))
    keys = [sampler(rng, (n, COLUMNS)) for n in counts]
    return _case(name, about, query, keys, **rest)


def _distribution(sampler: Sampler, **rest: Any) -> Iterator[Case]:
    """The shapes that each distribution is tried on: few keys, and a latency checkpoint's."""
    about = "16 rows of 1 to 32 keys, 128 heads"
    counts = [1 + 2 * r for r in range(15)] + [32]
    yield _drawn("short", about, sampler, 16, 128, counts, width=32, **rest)
    about = "5 rows of 192 to 256 keys, 96 heads"
    counts = [256, 255, 240, 224, 192]
    yield _drawn("checkpoint", about, sampler, 5, 96, counts, width=256, **rest)


# Distributions


def _unit_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    return e4m3_bytes(rng.standard_normal(shape))


def _student(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    return e4m3_bytes(rng.standard_t(2.0, shape))


def _tiny_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    return e4m3_bytes(rng.standard_normal(shape) * 2.0**-6)


def _any_finite(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    finite = np.array([b for b in range(256) if b & 0x7F != NAN_BYTE], np.uint8)
    return rng.choice(finite, shape)


def _mostly_subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    sign = rng.integers(0, 2, shape).astype(np.uint8) << 7
    subnormal = rng.integers(0, 8, shape).astype(np.uint8)
    low_normal = rng.integers(8, 40, shape).astype(np.uint8)
    return np.bitwise_or(sign, np.where(rng.random(shape) < 0.9, subnormal, low_normal))


@family
def normal() -> Iterator[Case]:
    """Unit normal queries and keys."""
    yield from _distribution(_unit_normal)
    counts = [16] * 64
    yield _drawn("many", "64 rows of 16 keys, 128 heads", _unit_normal, 64, 128, counts, width=16)
    counts = [2048, 1999, 1024]
    yield _drawn("long", "3 rows of 1024 to 2048 keys", _unit_normal, 3, 16, counts, width=2048)


@family
def heavy_tailed() -> Iterator[Case]:
    """Student's t with 2 degrees of freedom: a few entries a hundred times the median."""
    yield from _distribution(_student, scale_log2=UNIT_SCALE / 4, out_scale=0.37)


@family
def peaky() -> Iterator[Case]:
    """Unit normal entries under a scale that lets one key of a row take most of the weight."""
    yield from _distribution(_unit_normal, scale_log2=1.0)


@family
def tiny() -> Iterator[Case]:
    """Entries about the least normal E4M3 number, 2^-6; one case with BF16-subnormal outputs."""
    yield from _distribution(_tiny_normal, scale_log2=UNIT_SCALE * 64, out_scale=2.0**-12)
    about = "an output scale of 2^-124: outputs are BF16 subnormals"
    counts = list(range(1, 65))
    yield _drawn("underflow", about, _tiny_normal, 64, 16, counts, width=64, out_scale=2.0**-124)


@family
def uniform_bytes() -> Iterator[Case]:
    """Every finite E4M3 byte with the same probability: all exponents meet in one product sum."""
    yield from _distribution(_any_finite, scale_log2=2.0**-17, out_scale=2.0**-3)
    about = "64 rows of 16 keys, 128 heads, sharp"
    counts = [16] * 64
    yield _drawn("many", about, _any_finite, 64, 128, counts, width=16, scale_log2=2.0**-12)


@family
def subnormal_heavy() -> Iterator[Case]:
    """Nine entries in ten are E4M3 subnormals or zeros of either sign."""
    yield from _distribution(_mostly_subnormal, scale_log2=2.0**6, out_scale=2.0**4)


# Logits by design: the query's latent columns are zero, so the rope columns alone make the logit
# and the latent columns are free to be any V.


def _rope_query(batch: int, heads: int, first: Sequence[float]) -> Bytes:
    """Queries `[batch, heads, 576]`, zero but for the first rope columns."""
    query = np.zeros((batch, heads, COLUMNS))
    query[..., LATENT : LATENT + len(first)] = first
    return e4m3_bytes(query)


def _rope_keys(latent: Bytes, *first: NDArray[np.float64]) -> Bytes:
    """Keys `[n, 576]` of the given V bytes `[n, 512]`, with rope columns zero but for the first."""
    rope = np.zeros((len(latent), ROPE))
    for column, values in enumerate(first):
        rope[:, column] = values
    return np.concatenate([latent, e4m3_bytes(rope)], axis=1)


def _constant_latent(rng: np.random.Generator, n: int) -> Bytes:
    """n times the same V row, `[n, 512]`."""
    return np.repeat(_unit_normal(rng, (1, LATENT)), n, axis=0)


@family
def equal_logits() -> Iterator[Case]:
    """All logits of a row are equal: zero, and the dot product of the rope columns."""
    for name, level in (("zero", 0.0), ("nonzero", 1.75)):
        rng = _rng(f"equal {name}")
        keys = [
            _rope_keys(_unit_normal(rng, (n, LATENT)), np.full(n, -level))
            for n in (256, 255, 65, 33, 7)
        ]
        about = f"96 heads; every dot product is {-level * level}"
        yield _case(name, about, _rope_query(5, 96, [level]), keys, width=256, scale_log2=1.0)


@family
def dominant() -> Iterator[Case]:
    """One logit at 0, 2047 at -7 in base-2 units, one and the same V row for all keys.

    The exact answer is that V row, and 16/17 of the weight lies on the small terms. A second case
    has them at -7.5, where P lies between two E4M3 numbers.
    """
    for name, rest in (("on-grid", 7.0), ("off-grid", 7.5)):
        rng = _rng(f"dominant {name}")
        keys = []
        for n, place in ((2048, 0), (2048, 1234), (2048, 2047)):
            values = np.full(n, -rest)
            values[place] = 0.0
            keys.append(_rope_keys(_constant_latent(rng, n), values))
        about = f"2047 keys at {-rest}; the dominant key first, in the middle, last"
        yield _case(name, about, _rope_query(3, 16, [1.0]), keys, width=2048, scale_log2=1.0)


HUGELY_NEGATIVE = float(np.float32(-66854.859))


def _scale_to(target: float, dot: float) -> float:
    """A float32 scale whose float32 product with `dot` is `target` exactly."""
    first = np.float32(target / dot)
    for scale in (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(1e9))):
        if np.float32(dot) * scale == np.float32(target):
            return float(scale)
    raise ValueError(f"target must be {dot} times a float32 scale, got {target}")


@family
def hugely_negative() -> Iterator[Case]:
    """Logits at and around -66854.859: past any finite value that stands in for minus infinity."""
    scale = _scale_to(HUGELY_NEGATIVE, -MAX_E4M3)
    for name, spread in (("equal", 0), ("around", 7)):
        rng = _rng(f"negative {name}")
        keys = []
        for n in (256, 255, 65, 33, 1):
            steps = rng.integers(0, spread + 1, n) / 8.0
            keys.append(_rope_keys(_unit_normal(rng, (n, LATENT)), np.full(n, -MAX_E4M3), steps))
        about = f"96 heads; logits over {spread} steps of {scale / 128:.3f} upward"
        query = _rope_query(5, 96, [1.0, 0.0625])
        yield _case(name, about, query, keys, width=256, scale_log2=scale)


@family
def huge_logits() -> Iterator[Case]:
    """Logits past 2^22, where the max's last place is so coarse that P rises over 448."""
    scale = 2.0**22 * 1.3125 / MAX_E4M3
    for name, sign in (("equal", 1.0), ("negative", -1.0)):
        rng = _rng(f"huge {name}")
        keys = [
            _rope_keys(_unit_normal(rng, (n, LATENT)), np.full(n, sign * MAX_E4M3))
            for n in (256, 255, 65, 33, 7)
        ]
        about = f"32 heads; every logit is {sign * MAX_E4M3 * scale:g}"
        yield _case(name, about, _rope_query(5, 32, [1.0]), keys, width=256, scale_log2=scale)


@family
def rising_max() -> Iterator[Case]:
    """The row max rises in the last 64-key chunk of each of the 4 CTAs, or in every chunk."""
    for name, ramp in (
        ("last-chunk", lambda c: 8.0 * (c == 7)),
        ("every-chunk", lambda c: 1.0 * c),
    ):
        rng = _rng(f"rising {name}")
        chunk = np.arange(2048) % 512 // 64
        keys = []
        for _ in range(3):
            noise = e4m3_bytes(rng.uniform(-0.25, 0.25, 2048))
            values = np.array([ramp(c) for c in chunk])
            keys.append(_rope_keys(_unit_normal(rng, (2048, LATENT)), values, e4m3_values(noise)))
        about = "3 rows of 2048 keys: 512 a CTA, 8 chunks"
        yield _case(name, about, _rope_query(3, 16, [1.0, 1.0]), keys, width=2048, scale_log2=1.0)


# Real activations


@family
def real_activations() -> Iterator[Case]:
    """Hidden states of a real text, projected as MLA projects, with their outlier channels.

    The bytes are stored (docs/real-inputs.md); a seed moves their places in the cache alone.
    """
    inputs = real_inputs.load()
    scales: dict[str, Any] = {"scale_log2": inputs.scale_log2, "out_scale": inputs.out_scale}

    def attended(counts: Sequence[int]) -> list[Bytes]:
        """The best keys of each token, in the order of the text."""
        chosen = zip(inputs.keys, counts, strict=False)
        return [inputs.kv[np.sort(best[:count])] for best, count in chosen]

    about = "5 tokens, their best 192 to 256 keys, 32 heads"
    keys = attended([256, 255, 240, 224, 192])
    yield _case("checkpoint", about, inputs.query[:, :32], keys, width=256, **scales)
    about = "4 tokens, their best 33 to 64 keys, 48 heads of 128"
    keys = attended([64, 63, 40, 33])
    yield _case("few-keys", about, inputs.query[:4, :48], keys, width=64, padded=128, **scales)


# Counts, ids, NaN, heads

COUNTS = (0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 511, 2048)


@family
def counts() -> Iterator[Case]:
    """Counts at every edge of lanes, warps, chunks and splits; over the width; negative."""
    lengths = [*COUNTS, 2048, 2048, 64, 64]
    valid = [*COUNTS, 2049, 2**31 - 1, -1, -(2**31)]
    about = f"valid = {valid} at width 2048"
    yield _drawn("edges", about, _unit_normal, 20, 16, lengths, width=2048, valid=valid)
    about = "valid = 0 to 63 at width 64"
    yield _drawn("short", about, _unit_normal, 64, 16, list(range(64)), width=64)


INVALID_PLACES = MappingProxyType(
    {
        "front": slice(0, 1),
        "middle": slice(300, 301),
        "end": slice(511, 512),
        "chunk": slice(64, 128),
        "cta": slice(256, 384),
        "row": slice(0, 512),
    }
)


def invalid_ids_of(total: int) -> tuple[int, ...]:
    """The ids outside a cache of `total` rows that the family places."""
    return (-(2**31), -1, total, 2**31 - 1)


@family
def invalid_ids() -> Iterator[Case]:
    """Ids outside the cache at the front, middle and end; over a chunk, a CTA, a whole row."""
    n, batch = 512, 4 * len(INVALID_PLACES) + 2
    about = "26 rows of 512 keys (128 a CTA, 2 chunks): 6 places x 4 ids, a mixture, one key left"
    case = _drawn("places", about, _unit_normal, batch, 16, [n] * batch, width=n)
    rows, kv = case.rows.copy(), case.kv.copy()
    outside = np.array(invalid_ids_of(len(kv)), np.int64).astype(np.int32)
    for r in range(4 * len(INVALID_PLACES)):
        rows[r, list(INVALID_PLACES.values())[r // 4]] = outside[r % 4]
    rng = _rng("invalid mixture")
    rows[batch - 2] = np.where(rng.random(n) < 0.5, rng.choice(outside, n), rows[batch - 2])
    rows[batch - 1] = np.where(np.arange(n) == 77, rows[batch - 1], outside[1])
    # The first and the last row of the cache are valid ids; what is named nowhere any more is NaN.
    kv[[0, -1]] = _unit_normal(rng, (2, COLUMNS))
    rows[:4, 1], rows[:4, 2] = 0, len(kv) - 1
    unnamed = np.setdiff1d(np.arange(len(kv)), rows)
    kv[unnamed] = NAN_BYTE
    yield replace(case, rows=rows, kv=kv)


@family
def many_keys() -> Iterator[Case]:
    """Rows of many heads and several chunks, the last one in part; ids outside in every chunk."""
    counts = (1100, 1099, 1025, 1024, 1023, 577, 576, 513, 512, 511, 129, 65)
    about = f"96 heads, rows of {', '.join(map(str, counts))} keys; every 37th id is outside"
    case = _drawn("chunks", about, _unit_normal, 12, 96, list(counts), width=1100)
    rows, kv = case.rows.copy(), case.kv.copy()
    rows[:, 20::37] = np.resize(np.array([-1, len(kv)], np.int32), rows[:, 20::37].shape)
    kv[np.setdiff1d(np.arange(len(kv)), rows)] = NAN_BYTE
    yield replace(case, rows=rows, kv=kv)


@family
def nan_used() -> Iterator[Case]:
    """NaN in a key or a query that is used: rows 0 to 2 and 3 NaN in part, row 4 not at all."""
    case = _drawn(
        "keys-and-query",
        "row 0: a key's latent column; row 1: a key's rope column; "
        "row 2: heads 5 and 90 of the query; row 3: every key; row 4: none",
        _unit_normal,
        5,
        96,
        [256, 200, 129, 64, 256],
        width=256,
    )
    kv, query = case.kv.copy(), case.query.copy()
    kv[case.rows[0, 100], 17] = NAN_BYTE
    kv[case.rows[1, 199], 575] = 0xFF
    query[2, 5, 3], query[2, 90, 570] = NAN_BYTE, 0xFF
    kv[case.rows[3, :64], 40] = NAN_BYTE
    yield replace(case, kv=kv, query=query)


@family
def padded_heads() -> Iterator[Case]:
    """Fewer heads than the buffers hold, fewer rows than the mailbox; the rest stays as it is."""
    counts = [256, 128, 0, 31, 200]
    about = "96 heads of 128, 5 rows of 8"
    yield _drawn("mailbox", about, _unit_normal, 5, 96, counts, width=256, padded=128, cap=8)


@family
def head_counts() -> Iterator[Case]:
    """Every number of heads from 16 to 128."""
    for heads in range(16, 129, 16):
        about = f"{heads} heads of 128"
        yield _drawn(
            f"{heads}", about, _unit_normal, 4, heads, [64, 63, 40, 9], width=64, padded=128
        )


def batch_of_64() -> Case:
    """64 rows of 0 to 640 keys, 32 heads: no family, but what rows alone are compared with."""
    lengths = [10 * r for r in range(63)] + [640]
    about = "64 rows of 0 to 640 keys, 32 heads"
    return _drawn("batch-of-64", about, _unit_normal, 64, 32, lengths, width=640)
