"""Where the error comes from: one rounding at a time, from the exact answer to the kernel's.

Roundings are switched on in the order of the data (`altered_reference.STAGES`). The size of a step
is the change that its rounding makes to the result of the steps before. After the last step the
error is the kernel's, and the recorded bits differ from the last step's nowhere. Each rounding is
also measured alone, with all others exact. The costs are the kernel's whole error under each
counterfactual that changes what is rounded.

Sizes are root mean squares over a case's latents, in units of the last place (ULP) of BF16 at the
largest latent of each row and head, and relative to the root mean square of the exact latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import sparse_mla_reference
from sparse_mla_verify.evidence.recordings import Recording, digests_of
from sparse_mla_verify.inputs.cases import (
    FAMILIES,
    HEAD_TILE,
    Case,
    all_cases,
    exact_logits,
)
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.measure.bits import bits_of
from sparse_mla_verify.measure.ulp_errors import ulp_of
from sparse_mla_verify.models.altered_reference import (
    ALL_STAGES,
    CONTRACT,
    STAGES,
    Alteration,
    Altered,
)
from sparse_mla_verify.models.counterfactuals import BY_NAME
from sparse_mla_verify.processes.workers import spread

HEADS = 32  # of the first row of a case
BF16_BYTES = 2

# One case of each family whose latents are finite and not all zero.
CASES = (
    "normal/checkpoint",
    "heavy-tailed/checkpoint",
    "peaky/checkpoint",
    "tiny/checkpoint",
    "uniform-bytes/checkpoint",
    "subnormal-heavy/checkpoint",
    "equal-logits/nonzero",
    "dominant/off-grid",
    "hugely-negative/around",
    "rising-max/every-chunk",
    "real-activations/checkpoint",
)
# The counterfactuals that change what is rounded, rather than in which order or what is written.
COSTS = (
    "p-fp32",
    "p-bf16",
    "p-e5m2",
    "p-rz",
    "p-stochastic",
    "p-scale-1",
    "p-scale-256",
    "p-max-row",
    "sum-quantised",
    "mma-13-bits",
    "mma-exact",
    "partials-bf16",
    "out-twice",
    "out-rz",
)


@dataclass(frozen=True)
class Size:
    """The size of a difference of latents, and of LSEs (the largest, in natural units)."""

    ulp: float = 0.0
    relative: float = 0.0
    worst_ulp: float = 0.0
    lse: float = 0.0


@dataclass(frozen=True)
class Step:
    """A rounding: its change after the roundings before it, the error then, and its error alone."""

    stage: str
    change: Size
    error: Size
    alone: Size


@dataclass(frozen=True)
class Cost:
    """The whole error under a counterfactual."""

    name: str
    about: str
    error: Size


@dataclass(frozen=True)
class Worst:
    """The latent with the largest error, in hex, with what made it.

    query and key are the 576 bytes of the head's query and of the key with the largest weight.
    """

    row: int
    head: int
    column: int
    exact: float
    bits: str
    error_ulp: float
    keys: int
    query: str
    key_id: int
    key_weight: float
    key: str


@dataclass(frozen=True)
class Attribution:
    """A case's error, rounding by rounding."""

    family: str
    case: str
    elements: int
    steps: tuple[Step, ...]
    costs: tuple[Cost, ...]
    tiles: int
    tiles_differing: int | None  # of the kernel's from the last step's; None: not recorded
    worst: Worst

    @property
    def error(self) -> Size:
        """The kernel's."""
        return self.steps[-1].error


Decoded = tuple[NDArray[np.float64], NDArray[np.float64]]


def part_of(case: Case) -> Case:
    """The first row of a case, at most `HEADS` heads: a rounding's size needs no more."""
    heads = min(HEADS, case.heads)
    return replace(
        case, query=case.query[:1, :heads], rows=case.rows[:1], valid=case.valid[:1], heads=heads
    )


def cases_of(families: Sequence[str] = (), schedule: str = BASE) -> tuple[Case, ...]:
    """The parts of `CASES` in the named families, or in all."""
    in_order = dict.fromkeys(name.split("/")[0] for name in CASES)
    wanted = [f for f in in_order if f in FAMILIES and f in (families or in_order)]
    made = all_cases(wanted, schedule) if wanted else ()
    return tuple(part_of(case) for case in made if case.name in CASES)


def attribute(case: Case, machine: str = "SM90", recording: Recording | None = None) -> Attribution:
    """Attribute the error of a case of finite latents (its first row, a few heads)."""
    exact = _decode(case, machine, frozenset())
    before, steps, on = exact, [], frozenset[str]()
    for stage in STAGES:
        on |= {stage}
        after = _decode(case, machine, on)
        alone = _decode(case, machine, frozenset({stage}))
        change, error = size(after, before, exact), size(after, exact, exact)
        steps.append(Step(stage, change, error, size(alone, exact, exact)))
        before = after
    costs = []
    for name in COSTS:
        other = _decode(case, machine, ALL_STAGES, BY_NAME[name].alteration)
        costs.append(Cost(name, BY_NAME[name].about, size(other, exact, exact)))
    differing = None if recording is None else _differing(case, machine, recording)
    tiles = case.tiles
    return Attribution(
        case.family,
        case.name,
        before[0].size,
        tuple(steps),
        tuple(costs),
        tiles,
        differing,
        worst_of(case, before[0], exact),
    )


def worst_of(case: Case, latent: NDArray[np.float64], exact: Decoded) -> Worst:
    """The element with the largest error, in ULP of its row's largest latent."""
    unit = ulp_of(np.abs(exact[0]).max(axis=-1, keepdims=True), BF16_BYTES)
    error = np.abs(latent - exact[0]) / unit
    row, head, column = (int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    at = (row, head, column)
    weights = np.exp2(exact_logits(case, row)[head] - exact[1][row, head] / np.log(2))
    heaviest = int(np.nanargmax(weights))
    key_id = int(case.rows[row, heaviest])
    bits = int(latent[at].astype(ml_dtypes.bfloat16).view(np.uint16))
    return Worst(
        *at,
        exact=float(exact[0][at]),
        bits=f"0x{bits:04X}",
        error_ulp=float(error[at]),
        keys=int(case.counts[row]),
        query=case.query[row, head].tobytes().hex(),
        key_id=key_id,
        key_weight=float(weights[heaviest]),
        key=case.kv[key_id].tobytes().hex(),
    )


def _decode(
    case: Case, machine: str, stages: frozenset[str], alteration: Alteration = CONTRACT
) -> Decoded:
    gpu = getattr(sparse_mla_reference, machine)
    latent, lse = Altered(REFERENCE[case.schedule], gpu, alteration, stages).decode(case)
    return latent.astype(np.float64), lse.astype(np.float64)


def _differing(case: Case, machine: str, recording: Recording) -> int | None:
    """How many recorded tiles of the part have other bits than the model; None: not recorded."""
    record = next((r for r in recording.cases if r.name == case.name), None)
    if record is None:
        return None
    gpu = getattr(sparse_mla_reference, machine)
    latent, lse = Altered(REFERENCE[case.schedule], gpu).decode(case)
    kept = recording.arrays[f"{case.name}/lse"][: case.batch, : case.heads]
    lse_same = np.all((kept == bits_of(lse)).reshape(case.batch, -1, HEAD_TILE), axis=-1)
    found = np.array(digests_of(bits_of(latent)))
    recorded = np.array([row[: found.shape[1]] for row in record.digests[: case.batch]])
    return int(np.sum(~((found == recorded) & lse_same)))


def size(a: Decoded, b: Decoded, exact: Decoded) -> Size:
    """The size of a - b: latents `[batch, heads, 512]` and LSEs `[batch, heads]`."""
    gap = np.abs(a[0] - b[0])
    unit = ulp_of(np.abs(exact[0]).max(axis=-1, keepdims=True), BF16_BYTES)
    scale = _rms(exact[0])
    lse = np.abs(a[1] - b[1])
    return Size(
        ulp=_rms(gap / unit),
        relative=_rms(gap) / scale if scale else 0.0,
        worst_ulp=float(np.max(gap / unit)),
        lse=float(lse.max()),
    )


def _rms(x: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def attribute_all(
    cases: Sequence[Case],
    machine: str = "SM90",
    recording: Recording | None = None,
    *,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Attribution]:
    """`attribute` every case over `workers` processes (all cores unless said), in their order."""
    found: dict[int, Attribution] = {}
    tasks = [(case, machine, recording) for case in cases]
    for k, attribution in spread(attribute, tasks, workers):
        found[k] = attribution
        advance()
    return [found[k] for k in range(len(cases))]
