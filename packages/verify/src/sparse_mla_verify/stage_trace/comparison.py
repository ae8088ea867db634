"""The reference's stages in the areas of a debug build, and the first stage that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import CONTRACT, Steps
from sparse_mla_reference.trace import Trace, trace
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.bits import bits_of
from sparse_mla_verify.stage_trace.areas import KEY_STAGES, NOT_STORED, OUTPUTS, STORED, Areas

#: The bits of each stage and of each output, by name.
Stages = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class StageDifference:
    """What one stage of a kernel has in common with the reference's.

    Attributes:
        stage: The stage's name.
        elements: Elements that the reference has.
        differing: Elements whose bits differ, or that only one of the two has.
        first: Where the first of these is, and both bit patterns; "" if there is none.
    """

    stage: str
    elements: int
    differing: int
    first: str

    def __str__(self) -> str:
        text = f"{self.stage:8} {self.differing:9} of {self.elements:9} elements differ"
        return text + (f"; the first is {self.first}" if self.first else "")


def areas_of(case: Case) -> Areas:
    """Where a debug build stores the stages of a case."""
    split = REFERENCE[case.schedule].split
    return Areas(case.batch, case.heads, split, case.rows.shape[1])


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The shape of each stage and of each output of a case."""
    areas = areas_of(case)
    rows = case.batch, case.heads
    return {**{stage: areas.shape(stage) for stage in STORED}, "lse": rows, "latent": (*rows, 512)}


def reference_stages(case: Case, steps: Steps = CONTRACT) -> dict[str, NDArray[Any]]:
    """What a debug build must store for a case, and its outputs.

    Args:
        case: The inputs.
        steps: The contract's steps; with one of them replaced, the stages of another kernel.

    Returns:
        Each of `STORED` as ``Areas.shape`` says, uint32, ``NOT_STORED`` where there is no key;
        ``lse`` [batch, heads] uint32 and ``latent`` [batch, heads, 512] uint16.
    """
    areas, shapes = areas_of(case), _shapes(case)
    stages: dict[str, NDArray[Any]] = {
        stage: np.full(shapes[stage], NOT_STORED, np.uint32) for stage in STORED
    }
    stages["lse"] = np.zeros(shapes["lse"], np.uint32)
    stages["latent"] = np.zeros(shapes["latent"], np.uint16)
    for row in range(case.batch):
        traced = traced_row(case, row, steps)
        for cta in range(areas.split):
            _fill(stages, traced, row, cta)
        stages["lse"][row] = bits_of(traced.get("natural"))
        stages["latent"][row] = bits_of(traced.get("round_out"))
    return stages


def traced_row(case: Case, row: int, steps: Steps = CONTRACT) -> Trace:
    """The reference's trace of a row of a case."""
    return trace(**case.arguments, row=row, schedule=REFERENCE[case.schedule], steps=steps)


def _fill(stages: Mapping[str, NDArray[Any]], traced: Trace, row: int, cta: int) -> None:
    """Put what one CTA computes for a row into its place."""
    state = traced.get("start", cta=cta)
    top, total, acc = state.max, state.sum, state.acc
    _, used = traced.get("gather")
    part = traced.schedule.parts(len(traced.order))[cta]
    for chunk, inside in enumerate(traced.schedule.chunks(part.stop - part.start)):
        keys = slice(part.start + inside.start, part.start + inside.stop)
        logits = np.where(used[keys], traced.logits(cta, chunk), np.float32(-np.inf))
        stages["logits"][row, :, cta, inside] = bits_of(logits)
        stages["p"][row, :, cta, inside] = bits_of(traced.get("numerators", cta=cta, chunk=chunk))
        quantised = traced.get("quantise", cta=cta, chunk=chunk)
        stages["p_bytes"][row, :, cta, inside] = bits_of(quantised)
        top, total, acc = (
            traced.get(name, cta=cta, chunk=chunk) for name in ("running_max", "running_sum", "pv")
        )
    stages["max"][row, :, cta, 0] = bits_of(top)
    stages["sum"][row, :, cta, 0] = bits_of(total)
    stages["partial"][row, :, cta] = bits_of(acc)


def compare_stages(
    case: Case, actual: Stages, expected: Stages, stages: Sequence[str] = tuple(STORED)
) -> list[StageDifference]:
    """Compare stages and then the outputs, in the order of the data.

    Args:
        case: The inputs.
        actual: The kernel's stages, as :func:`reference_stages` gives them.
        expected: The reference's.
        stages: Which of `STORED` are compared.

    Raises:
        ValueError: A stage is none of `STORED`, `actual` or `expected` lacks a stage or an output,
            `expected` has another shape than the case has, or an array of the two has another
            shape or another width.
    """
    if unknown := [stage for stage in stages if stage not in STORED]:
        raise ValueError(f"stages must be of {', '.join(STORED)}, got {unknown}")
    names = [*(stage for stage in STORED if stage in stages), *OUTPUTS]
    for argument, arrays in (("actual", actual), ("expected", expected)):
        if not set(names) <= arrays.keys():
            raise ValueError(f"{argument} must have {', '.join(names)}, got {', '.join(arrays)}")
    shapes = _shapes(case)
    for name in names:
        if expected[name].shape != shapes[name]:
            raise ValueError(
                f"expected[{name!r}] must be {list(shapes[name])} for {case.name}, "
                f"got {list(expected[name].shape)}"
            )
    return [_compared(case, name, actual[name], expected[name]) for name in names]


def first_differing(differences: Sequence[StageDifference]) -> str | None:
    """The name of the first stage that differs; None if no bit differs."""
    return next((d.stage for d in differences if d.differing), None)


def _compared(
    case: Case, stage: str, actual: NDArray[Any], expected: NDArray[Any]
) -> StageDifference:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"actual[{stage!r}] must be {expected.dtype} {list(expected.shape)}, "
            f"got {actual.dtype} {list(actual.shape)}"
        )
    stored = stage in STORED
    elements = int(np.count_nonzero(expected != NOT_STORED)) if stored else expected.size
    where = np.argwhere(actual != expected)
    first = ""
    if len(where):
        at = tuple(map(int, where[0]))
        digits = 2 * expected.dtype.itemsize
        bits = [_said(int(x[at]), digits, stored) for x in (expected, actual)]
        first = f"{place(case, stage, at)}: expected {bits[0]}, got {bits[1]}"
    return StageDifference(stage, elements, len(where), first)


def _said(bits: int, digits: int, stored: bool) -> str:
    return "nothing stored" if stored and bits == NOT_STORED else f"0x{bits:0{digits}X}"


def place(case: Case, stage: str, at: tuple[int, ...]) -> str:
    """An element of a stage in words: its row, head, CTA, chunk, key or column."""
    text = f"row {at[0]}, head {at[1]}"
    if stage == "latent":
        return f"{text}, column {at[2]}"
    if stage == "lse":
        return text
    text += f", CTA {at[2]}"
    if stage == "partial":
        return f"{text}, column {at[3]}"
    if stage not in KEY_STAGES:
        return text
    schedule = REFERENCE[case.schedule]
    chunk = at[3] // schedule.chunk
    count = int(case.counts[at[0]])
    part = schedule.parts(count)[at[2]]
    own = schedule.order(count)[part]
    key = f"key {int(own[at[3]])}" if at[3] < len(own) else "past the CTA's keys"
    return f"{text}, chunk {chunk}, {key}"
