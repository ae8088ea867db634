"""Counterfactuals: for each claim about the arithmetic, the models in which it is false.

A claim says something only if the same data would refute other claims. A counterfactual decodes the
same cases that decide its claim, and its bits are compared with the kernel's too. The claim holds
if the kernel's bits are the contract's and differ from the counterfactual's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparse_mla_reference
from sparse_mla_reference import Schedule
from sparse_mla_verify.evidence.evidence import CaseEvidence, Trial
from sparse_mla_verify.evidence.recordings import digests_of
from sparse_mla_verify.inputs.cases import HEAD_TILE, LATENT, Case
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.predict import Bits
from sparse_mla_verify.models.altered_reference import CONTRACT, Alteration, Altered
from sparse_mla_verify.processes.workers import spread

SMS = 132  # of an H200: what a split that fills the GPU would go by


@dataclass(frozen=True)
class Counterfactual:
    """A model in which a claim is false.

    Attributes:
        name: a unique word.
        claim: the claim that it contradicts.
        about: the model in words, as the end of "a kernel that ...".
        alteration: how its arithmetic differs.
        schedule: how its order differs: a name in `OTHER_SCHEDULES`, or "" for the same order.
        data: the cases that tell it from the contract. If none of them was run, others are taken.
    """

    name: str
    claim: str
    about: str
    alteration: Alteration = CONTRACT
    schedule: str = ""
    data: tuple[str, ...] = ("normal/checkpoint", "heavy-tailed/checkpoint")


def _filling(schedule: Schedule, case: Case) -> Schedule:
    """As many CTAs for each row as fill the GPU: the fewer rows, the more CTAs."""
    clusters = case.batch * case.heads // HEAD_TILE
    split = 2 ** int(np.log2(np.clip(SMS // clusters, 1, 8)))
    return replace(schedule, split=split)


def _other_mma(schedule: Schedule, case: Case) -> Schedule:
    return replace(schedule, mma="e4m3" if schedule.mma == "f16" else "f16")


def _other_chains(schedule: Schedule, case: Case) -> Schedule:
    return replace(schedule, qk_chains=1)


def _other_sum(schedule: Schedule, case: Case) -> Schedule:
    return replace(schedule, warp_keys=schedule.chunk if schedule.warp_keys == 8 else 8)


def _other_chunk(schedule: Schedule, case: Case) -> Schedule:
    return replace(schedule, chunk=2 * schedule.chunk)


OTHER_SCHEDULES: Mapping[str, Callable[[Schedule, Case], Schedule]] = MappingProxyType(
    {
        "filling": _filling,
        "other mma": _other_mma,
        "one chain": _other_chains,
        "other sum": _other_sum,
        "double chunk": _other_chunk,
    }
)

# The claims that have counterfactuals: stage and statement.
CLAIMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "p-is-e4m3": ("softmax", "P is quantised to E4M3 before it is multiplied by V."),
        "p-rounds-to-nearest": (
            "softmax",
            "P is rounded to the nearest E4M3 number, with ties to even.",
        ),
        "p-saturates": ("softmax", "A P above 448, the largest E4M3 number, becomes 448."),
        "p-scale-is-448": ("softmax", "The key with the largest logit so far gets P = 448."),
        "p-max-is-running": (
            "softmax",
            "P is scaled to the CTA's running max, not to the max of all its keys or of the row.",
        ),
        "sum-is-of-p": ("softmax", "The row sum adds up P before P is quantised."),
        "fp32-accumulation": (
            "logits, partial",
            "Products are accumulated in FP32 as the schedule's tensor-core instruction does it.",
        ),
        "order-of-sums": ("schedule", "All sums are added in the order that the schedule gives."),
        "fp32-partials": ("merge", "The partials of the CTAs are merged in FP32."),
        "one-bf16-rounding": (
            "merge",
            "The output is rounded to BF16 once, to nearest, with ties to even.",
        ),
        "lse-is-natural": ("lse", "Without push mode, the LSE is a natural logarithm."),
        "empty-row-convention": (
            "lse",
            "A row without keys gets latents of 0 and an LSE of -infinity.",
        ),
        "masked-ids": ("gather", "An id outside the cache contributes nothing to the output."),
        "fixed-split": (
            "schedule",
            "How a row's keys are split depends on nothing but their number.",
        ),
    }
)

_SHORT = ("counts/short",)
_LONG = ("rising-max/every-chunk", "normal/long")
_WIDE = ("uniform-bytes/checkpoint", "heavy-tailed/checkpoint")


def _p(name: str, about: str, claim: str, **changes: Any) -> Counterfactual:
    return Counterfactual(name, claim, about, Alteration(**changes))


CATALOGUE: tuple[Counterfactual, ...] = (
    _p("p-bf16", "multiplies P in BF16", "p-is-e4m3", p_format="bf16"),
    _p("p-e5m2", "quantises P to E5M2", "p-is-e4m3", p_format="e5m2"),
    _p("p-fp32", "does not quantise P", "p-is-e4m3", p_format="fp32"),
    _p("p-rz", "truncates P", "p-rounds-to-nearest", p_rounding="rz"),
    _p("p-stochastic", "rounds P at random", "p-rounds-to-nearest", p_rounding="stochastic"),
    Counterfactual(
        "p-unsaturated",
        "p-saturates",
        "makes P past 464 a NaN",
        Alteration(p_saturates=False),
        data=("huge-logits/equal",),
    ),
    _p("p-scale-1", "leaves P unscaled", "p-scale-is-448", p_scale=1.0),
    _p("p-scale-240", "scales P to 240", "p-scale-is-448", p_scale=240.0),
    _p("p-scale-256", "scales P to 256", "p-scale-is-448", p_scale=256.0),
    _p("p-scale-447", "scales P to 447", "p-scale-is-448", p_scale=447.0),
    _p("p-max-row", "scales P to the row's max", "p-max-is-running", p_max="row"),
    Counterfactual(
        "p-max-cta",
        "p-max-is-running",
        "scales P to the max over all chunks of the CTA",
        Alteration(p_max="cta"),
        data=_LONG,
    ),
    _p("sum-quantised", "sums the quantised P", "sum-is-of-p", summed="quantised"),
    Counterfactual(
        "mma-13-bits",
        "fp32-accumulation",
        "accumulates at 13 fraction bits, as Hopper's native FP8 product does",
        Alteration(mma="13 bits"),
        data=_WIDE,
    ),
    Counterfactual(
        "mma-exact",
        "fp32-accumulation",
        "multiplies matrices exactly and rounds once",
        Alteration(mma="exact"),
        data=_WIDE,
    ),
    Counterfactual(
        "mma-other",
        "fp32-accumulation",
        "multiplies with the architecture's other instruction for E4M3 values",
        schedule="other mma",
        data=_WIDE,
    ),
    Counterfactual(
        "qk-one-chain", "order-of-sums", "sums QK in one chain", schedule="one chain", data=_WIDE
    ),
    Counterfactual(
        "sum-other-order", "order-of-sums", "sums P in another order", schedule="other sum"
    ),
    Counterfactual(
        "chunk-double",
        "order-of-sums",
        "takes chunks of twice as many keys",
        schedule="double chunk",
        data=_LONG,
    ),
    _p("partials-bf16", "merges BF16 partials", "fp32-partials", partials="bf16"),
    _p("out-twice", "rounds to BF16 before the V scale too", "one-bf16-rounding", out="twice"),
    _p("out-rz", "truncates its output to BF16", "one-bf16-rounding", out="rz"),
    _p("lse-base-2", "writes base-2 LSEs", "lse-is-natural", lse_base="2"),
    Counterfactual(
        "empty-inf", "empty-row-convention", "writes an LSE of +inf for no keys",
        Alteration(empty_lse=np.inf), data=_SHORT,
    ),
    Counterfactual(
        "empty-finite", "empty-row-convention", "writes an LSE of -1e30 for no keys",
        Alteration(empty_lse=-1e30), data=_SHORT,
    ),
    Counterfactual(
        "empty-nan", "empty-row-convention", "writes NaN latents for no keys",
        Alteration(empty_row=np.nan), data=_SHORT,
    ),
    Counterfactual(
        "ids-clamped", "masked-ids", "clamps an id outside the cache to row 0",
        Alteration(invalid="row 0"), data=("invalid-ids/places",),
    ),
    Counterfactual(
        "split-filling", "fixed-split", "splits a row the more the fewer rows there are",
        schedule="filling", data=("head-counts/16", "padded-heads/mailbox", "counts/short"),
    ),
)  # fmt: skip

BY_NAME = MappingProxyType({c.name: c for c in CATALOGUE})
FALLBACK = 2  # cases taken where none of the named ones was run


def decoded(counterfactual: Counterfactual, case: Case, machine: str) -> Bits:
    """The encodings that the counterfactual's kernel gives for a case."""
    schedule = REFERENCE[case.schedule]
    if counterfactual.schedule:
        schedule = OTHER_SCHEDULES[counterfactual.schedule](schedule, case)
    gpu = getattr(sparse_mla_reference, machine)
    return Altered(schedule, gpu, counterfactual.alteration).bits(case)


def trial(name: str, evidence: CaseEvidence, other: Bits) -> Trial:
    """Compare a kernel's results of a case with the contract's and the counterfactual's."""
    contract = evidence.assessment
    digests = np.array(evidence.digests or digests_of(evidence.latent))
    known = digests == np.array(digests_of(evidence.latent))  # [batch, tiles]
    tells = (evidence.latent != other[0]) & np.repeat(known, HEAD_TILE, axis=1)[..., None]
    return Trial(
        name,
        (evidence.case.name,),
        tiles=digests.size,
        tiles_of_contract=_same(digests, evidence.lse, (contract.latent, contract.lse)),
        tiles_of_counterfactual=_same(digests, evidence.lse, other),
        elements=evidence.latent.size + evidence.lse.size,
        telling=int(tells.sum()) + int(np.sum(evidence.lse != other[1])),
    )


def _same(digests: NDArray[Any], lse: NDArray[np.uint32], bits: Bits) -> int:
    """How many tiles have latents of these digests and these LSEs."""
    latent = digests == np.array(digests_of(bits[0]))
    return int(np.sum(latent & np.all((lse == bits[1]).reshape(*latent.shape, -1), axis=-1)))


def chosen(counterfactual: Counterfactual, evidence: Sequence[CaseEvidence]) -> list[CaseEvidence]:
    """The cases to compare it on: those that it names, or else the cheapest ones that were run."""
    named = [e for e in evidence if e.case.name in counterfactual.data]
    return named or sorted(evidence, key=lambda e: _cost(e.case))[:FALLBACK]


def _cost(case: Case) -> int:
    return int(np.sum(case.counts + 16)) * case.heads * LATENT


def try_all(
    evidence: Sequence[CaseEvidence],
    machine: str,
    *,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Trial]:
    """Compare every counterfactual with a kernel's results, over `workers` processes; by name.

    A counterfactual for which no case was run is left out.
    """
    pairs = [(c, e) for c in CATALOGUE for e in chosen(c, evidence)]
    trials: dict[str, Trial] = {}
    for k, bits in spread(decoded, [(c, e.case, machine) for c, e in pairs], workers):
        counterfactual, case = pairs[k]
        one = trial(counterfactual.name, case, bits)
        before = trials.get(one.name)
        trials[one.name] = before + one if before else one
        advance()
    return {c.name: trials[c.name] for c in CATALOGUE if c.name in trials}


def jobs(evidence: Sequence[CaseEvidence]) -> int:
    """How often `try_all` advances."""
    return sum(len(chosen(c, evidence)) for c in CATALOGUE)
