"""The reference's side: predicted bits, errors against the exact answer and the bounds on them.

The work is split by rows over processes; a row depends on no other (spec.md, "Split").
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparse_mla_reference
from sparse_mla_reference import IDEAL, SM90, Machine, decode
from sparse_mla_verify.inputs.cases import HEAD_TILE, Case
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.bits import bits_of
from sparse_mla_verify.measure.bound_check import BoundCheck, check_bounds
from sparse_mla_verify.measure.ulp_errors import UlpErrors, ulp_errors
from sparse_mla_verify.processes.workers import spread

Bits = tuple[
    NDArray[np.uint16], NDArray[np.uint32]
]  # latent [batch, heads, 512], lse [batch, heads]

ITEM_TILE_KEYS = 3000  # (head tile, key) pairs in one piece of work: about a second


@dataclass(frozen=True, eq=False)
class Assessment:
    """What the reference says of a case's results.

    latent and lse are the predicted encodings. The errors and the bounds are those of the given
    results, or of the predicted ones if no results were given.
    """

    latent: NDArray[np.uint16]
    lse: NDArray[np.uint32]
    latent_errors: UlpErrors  # in BF16 ulp of each element
    row_errors: UlpErrors  # in BF16 ulp of the largest element of each row and head
    lse_errors: UlpErrors  # in FP32 ulp
    bounds: BoundCheck


def _decode(case: Case, machine: Machine) -> tuple[NDArray[Any], NDArray[Any]]:
    return decode(**case.arguments, schedule=REFERENCE[case.schedule], machine=machine)


def predict(case: Case, machine: Machine = SM90) -> Bits:
    """The encodings that a machine's kernel gives for a case."""
    latent, lse = _decode(case, machine)
    return bits_of(latent), bits_of(lse)


def exact(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The exact answer in float64: latent `[batch, heads, 512]`, lse `[batch, heads]`."""
    return _decode(case, IDEAL)


def assess(case: Case, given: Bits | None = None, machine: Machine = SM90) -> Assessment:
    """Predict a case and measure `given`, or the prediction itself, against the exact answer."""
    latent, lse = predict(case, machine)
    got_latent, got_lse = given or (latent, lse)
    exact_latent, exact_lse = exact(case)
    return Assessment(
        latent=latent,
        lse=lse,
        latent_errors=ulp_errors(got_latent, exact_latent),
        row_errors=ulp_errors(got_latent, exact_latent, of_row=True),
        lse_errors=ulp_errors(got_lse, exact_lse),
        bounds=check_bounds(case, (got_latent, got_lse), (exact_latent, exact_lse), machine),
    )


def assess_all(
    cases: Sequence[Case],
    given: Mapping[str, Bits] | None = None,
    *,
    machine: str = "SM90",
    workers: int | None = None,
    advance: Callable[[Case, int], None] = lambda case, tiles: None,
) -> dict[str, Assessment]:
    """`assess` every case over `workers` processes (all cores unless said); by case name.

    `machine` is the name of one of the reference's machines. `advance` is called with the case and
    the number of tiles of each piece when it is done. With one worker everything runs in this
    process.
    """
    known = given or {}
    pieces = [p for case in cases for p in _pieces(case, known.get(case.name), machine)]
    pieces.sort(key=lambda piece: -_work(piece.case))
    done: dict[str, list[tuple[int, Assessment]]] = {case.name: [] for case in cases}
    for k, assessment in spread(_assess_piece, [(piece,) for piece in pieces], workers):
        piece = pieces[k]
        done[piece.whole].append((piece.start, assessment))
        advance(piece.case, piece.case.tiles)
    return {name: _joined(parts) for name, parts in done.items()}


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some rows of a case: a case of their own, the whole case's name, the first row, the
    results."""

    case: Case
    whole: str
    start: int
    given: Bits | None
    machine: str


def _work(case: Case) -> int:
    return int(np.sum(case.counts + 16)) * case.heads // HEAD_TILE


def _pieces(case: Case, given: Bits | None, machine: str) -> Iterator[_Piece]:
    step = max(1, case.batch * ITEM_TILE_KEYS // max(1, _work(case)))
    for start in range(0, case.batch, step):
        rows = slice(start, start + step)
        part = case.only(rows)
        kept = given and (given[0][rows], given[1][rows])
        yield _Piece(part, case.name, start, kept, machine)


def _assess_piece(piece: _Piece) -> Assessment:
    return assess(piece.case, piece.given, getattr(sparse_mla_reference, piece.machine))


def _joined(numbered: Sequence[tuple[int, Assessment]]) -> Assessment:
    """The pieces of a case, each with its first row, in the order of rows."""
    parts = [assessment for _, assessment in sorted(numbered, key=lambda part: part[0])]
    return Assessment(
        latent=np.concatenate([p.latent for p in parts]),
        lse=np.concatenate([p.lse for p in parts]),
        latent_errors=sum((p.latent_errors for p in parts), UlpErrors()),
        row_errors=sum((p.row_errors for p in parts), UlpErrors()),
        lse_errors=sum((p.lse_errors for p in parts), UlpErrors()),
        bounds=sum((p.bounds for p in parts), BoundCheck()),
    )
