"""Every intermediate of one row's decode, by contract step.

A kernel whose output differs in a bit went another way at some step. The trace holds what each step
gave, in order, so that a value that the kernel stored can be held against it, or the traces of two
models against each other:

>>> import numpy as np
>>> from dataclasses import replace
>>> from sparse_mla_reference import CONTRACT, e4m3
>>> rng = np.random.default_rng(0)
>>> query, kv = (e4m3.encode(rng.standard_normal(shape)) for shape in ((1, 2, 576), (9, 576)))
>>> case = query, kv, np.arange(9, dtype=np.int32)[None], np.int32([9])
>>> ours = trace(*case, scale_log2=0.06, out_scale=1.0)
>>> ours.get("numerators", cta=0, chunk=0).shape  # [heads, keys] of the first CTA: 3 of 9 keys
(2, 3)
>>> truncated = replace(CONTRACT, quantise=lambda p, machine: e4m3.encode(p, rounding="rz"))
>>> theirs = trace(*case, scale_log2=0.06, out_scale=1.0, steps=truncated)
>>> first_difference(ours, theirs)
'R11 (quantise) of CTA 0, chunk 0'
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import arguments
from sparse_mla_reference.decode import CONTRACT, Steps, decode
from sparse_mla_reference.machine import SM90, Machine
from sparse_mla_reference.schedule import BASE, Schedule

# The contract's step of each function of ``Steps``; "" where nothing is rounded or compared.
CONTRACT_STEP: Mapping[str, str] = MappingProxyType(
    {
        "gather": "",
        "products": "R1",
        "sum_of_chains": "R2",
        "logit": "R3",
        "start": "",
        "running_max": "R4",
        "alpha": "R5",
        "bias": "R6",
        "numerators": "R7",
        "chunk_sum": "R8",
        "running_sum": "R9",
        "rescale": "R10",
        "quantise": "R11",
        "pv": "R12",
        "merge_partials": "R13",
        "normalise": "R15",
        "lse2": "R14",
        "round_out": "R15",
        "natural": "R14",
    }
)


@dataclass(frozen=True, eq=False)
class Entry:
    """What one step gave.

    Attributes:
        name: the function of ``Steps``.
        cta: the CTA that it ran on; None for a step of the whole row.
        chunk: the chunk of the CTA's keys; None for a step that isn't of one chunk.
        value: what the function returned: an array, or a tuple or list of arrays.
    """

    name: str
    cta: int | None
    chunk: int | None
    value: Any

    @property
    def place(self) -> tuple[str, int | None, int | None]:
        """Name, CTA and chunk."""
        return self.name, self.cta, self.chunk

    def __str__(self) -> str:
        step = CONTRACT_STEP[self.name]
        named = f"{step} ({self.name})" if step else self.name
        cta = "" if self.cta is None else f" of CTA {self.cta}"
        return named + cta + ("" if self.chunk is None else f", chunk {self.chunk}")


@dataclass(frozen=True, eq=False)
class Trace:
    """What the steps of one row's decode gave.

    Attributes:
        entries: the steps in the order in which they ran.
        schedule: the row's schedule.
        order: [n] positions in the row's list of its n keys, the first CTA's first. The columns of
            ``get("logit")`` are in this order.
    """

    entries: tuple[Entry, ...]
    schedule: Schedule
    order: NDArray[np.int64]

    def get(self, name: str, *, cta: int | None = None, chunk: int | None = None) -> Any:
        """What a step gave: an array, or for some steps a tuple or list of arrays.

        | name | contract | value |
        |---|---|---|
        | ``gather`` | | keys [n, 576] bytes, used [n] bool |
        | ``products`` | R1 | list of [H, n], an accumulator chain each |
        | ``sum_of_chains``, ``logit`` | R2, R3 | [H, n] |
        | ``start`` | | ``Partial``; a CTA's |
        | ``running_max``, ``alpha``, ``bias`` | R4, R5, R6 | [H]; a chunk's, as all to ``pv`` |
        | ``numerators`` | R7 | P before its quantisation, [H, keys of the chunk] |
        | ``chunk_sum``, ``running_sum`` | R8, R9 | [H] |
        | ``rescale`` | R10 | [H, 512] accumulators |
        | ``quantise`` | R11 | P as E4M3 bytes, [H, keys of the chunk] |
        | ``pv`` | R12 | [H, 512] accumulators |
        | ``merge_partials`` | R13 | ``Sums``: max [H], total [H], row [H, 512] |
        | ``normalise``, ``round_out`` | R15 | [H, 512], before and after BF16 |
        | ``lse2``, ``natural`` | R14 | [H], in base 2 and e |

        Args:
            name: the step.
            cta: which CTA, from 0, for a step that every CTA runs.
            chunk: which chunk of the CTA's keys, from 0, for a step that every chunk runs.

        Raises:
            KeyError: no such step ran there.
        """
        for entry in self.entries:
            if entry.place == (name, cta, chunk):
                return entry.value
        places = sorted({str(e) for e in self.entries if e.name == name})
        ran = ", ".join(places) or f"of {', '.join(CONTRACT_STEP)}"
        raise KeyError(
            f"name, cta and chunk must be a step that ran ({ran}), got {name!r}, {cta}, {chunk}"
        )

    def keys(self, cta: int, chunk: int) -> NDArray[np.int64]:
        """Positions in the row's list of the keys of one chunk of one CTA."""
        return self.order[self._columns(cta, chunk)]

    def logits(self, cta: int, chunk: int) -> NDArray[Any]:
        """The logits (R3) of one chunk of one CTA: [H, keys of the chunk]."""
        return np.asarray(self.get("logit")[:, self._columns(cta, chunk)])

    def _columns(self, cta: int, chunk: int) -> slice:
        parts = self.schedule.parts(len(self.order))
        if cta not in range(len(parts)):
            raise ValueError(f"cta must be from 0 to {len(parts) - 1}, got {cta!r}")
        part = parts[cta]
        chunks = list(self.schedule.chunks(part.stop - part.start))
        if chunk not in range(len(chunks)):
            raise ValueError(
                f"chunk must be one of CTA {cta}'s {len(chunks)}, from 0, got {chunk!r}"
            )
        inside = chunks[chunk]
        return slice(part.start + inside.start, part.start + inside.stop)


def observed(steps: Steps, observe: Callable[[str, Any], None]) -> Steps:
    """The same steps; ``observe`` is called with the name of each and what it gave."""

    def watched(name: str) -> Callable[..., Any]:
        def step(*given: Any) -> Any:
            value = getattr(steps, name)(*given)
            observe(name, value)
            return value

        return step

    return replace(steps, **{field.name: watched(field.name) for field in fields(steps)})


def trace(
    query: NDArray[Any],
    kv: NDArray[Any],
    rows: NDArray[Any],
    valid: NDArray[Any],
    *,
    scale_log2: float,
    out_scale: float,
    row: int = 0,
    schedule: Schedule = BASE,
    machine: Machine = SM90,
    steps: Steps = CONTRACT,
) -> Trace:
    """Decode one row and keep what every step gave.

    Takes the arguments of ``decode``, and which row of the batch to decode.

    Args:
        query: as ``decode``.
        kv: as ``decode``.
        rows: as ``decode``.
        valid: as ``decode``.
        scale_log2: as ``decode``.
        out_scale: as ``decode``.
        row: the row, from 0 to B - 1.
        schedule: as ``decode``.
        machine: as ``decode``.
        steps: as ``decode``.

    Raises:
        TypeError: as ``decode``.
        ValueError: as ``decode``; or ``row`` is not one of the batch.
    """
    arguments.check_kind("steps", steps, Steps, "such as CONTRACT")
    args = arguments.check(query, kv, rows, valid, scale_log2, out_scale, schedule, machine)
    if isinstance(row, bool) or not isinstance(row, int):
        raise TypeError(f"row must be an integer, got {row!r}")
    if not 0 <= row < len(args.query):
        raise ValueError(f"row must be one of query's {len(args.query)} rows, from 0, got {row}")
    entries: list[Entry] = []
    cta = chunk = None

    def observe(name: str, value: Any) -> None:
        nonlocal cta, chunk
        if name == "start":
            cta, chunk = 0 if cta is None else cta + 1, None
        elif name == "running_max":
            chunk = 0 if chunk is None else chunk + 1
        elif name == "merge_partials":
            cta = chunk = None
        # A later step may work in place: what is kept is a copy.
        entries.append(Entry(name, cta, chunk, deepcopy(value)))

    one = slice(row, row + 1)
    decode(
        args.query[one],
        kv,
        np.asarray(rows)[one],
        np.asarray(valid)[one],
        scale_log2=scale_log2,
        out_scale=out_scale,
        schedule=schedule,
        machine=machine,
        steps=observed(steps, observe),
    )
    _, used = entries[0].value
    return Trace(tuple(entries), schedule, schedule.order(len(used)))


def first_difference(a: Trace, b: Trace) -> str | None:
    """Where two traces of one schedule and list of keys first differ in a bit, in words; or None.

    Raises:
        TypeError: ``a`` or ``b`` is not a ``Trace``.
        ValueError: the traces are of two schedules or lists of keys, or have other steps.
    """
    for name, given in (("a", a), ("b", b)):
        arguments.check_kind(name, given, Trace, "of trace()")
    if a.schedule != b.schedule:
        raise ValueError(f"a and b must be of one schedule, got {a.schedule} and {b.schedule}")
    if not np.array_equal(a.order, b.order):
        raise ValueError(
            f"a and b must be of one list of keys, got {len(a.order)} and {len(b.order)} keys"
        )
    places = [[entry.place for entry in x.entries] for x in (a, b)]
    if places[0] != places[1]:
        raise ValueError(
            "a and b must have the same steps on the same CTAs and chunks, "
            f"got {len(places[0])} and {len(places[1])} entries"
        )
    for one, other in zip(a.entries, b.entries, strict=True):
        if not _same(one.value, other.value):
            return str(one)
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
