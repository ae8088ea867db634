"""Which conventions a kernel follows, found out from its outputs alone.

Each question has a probe and a list of candidates. The probe is a case for which the candidates
give different outputs, and everything else is exact. A candidate's score is the share of elements
that it explains: those within half a unit of the output's type of its prediction. If the candidates
that explain nearly all elements agree, theirs is the answer. Otherwise it is `undetermined`, with
the reason.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import SM90, Schedule, bf16
from sparse_mla_reference.lse import CONVENTIONS, Base
from sparse_mla_verify.black_box import probe_cases
from sparse_mla_verify.black_box.adapters import Answer, Kernel, call
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.measure.ulp_errors import ulp_of
from sparse_mla_verify.models.altered_reference import Alteration, Altered, PFormat

UNDETERMINED = "undetermined"
EXPLAINS = 0.97  # the least share of elements that an answer must explain
AS_GOOD = 0.01  # candidates whose shares are so close are not told apart
NOISE = 2.0**-18  # of FP32 sums over a row, beside its largest latent
PLACES = slice(10, 42)  # of ids outside the cache, in lists of 96
WHOLE = Schedule(split=1, chunk=4096, warp_keys=8)

LN_2 = float(np.log(2.0))


ROW_MAX = Alteration(p_max="row")


@dataclass(frozen=True)
class Finding:
    """The answer to a question, and what it rests on."""

    question: str
    answer: str
    evidence: tuple[str, ...]

    @property
    def determined(self) -> bool:
        """Whether the outputs decide it."""
        return not self.answer.startswith(UNDETERMINED)


@dataclass(frozen=True)
class Subject:
    """A kernel, and what was found about it so far. Later questions build on earlier answers.

    `noise` is what its products and merges lose beyond FP32, relative to a row's largest latent.
    The comparison of roundings of P allows for it.
    """

    kernel: Kernel
    base: Base = "e"
    found: Alteration = ROW_MAX
    p_known: bool = False
    bits: int = 0
    excess: float = 0.0
    parts: int = 0

    @property
    def noise(self) -> float:
        """Allowed beside half a unit of the output."""
        return max(NOISE, 4 * self.excess)

    def ask(self, case: Case) -> Answer:
        """Its answer to a case."""
        return call(self.kernel, case)

    def natural(self, lse: NDArray[np.float64]) -> NDArray[np.float64]:
        """Its LSEs in natural units."""
        return lse * LN_2 if self.base == "2" else lse


Asked = tuple[list[Finding], Subject]
Question = Callable[[Subject], Asked]


def _exact(case: Case, alteration: Alteration | None = None, schedule: Schedule = WHOLE) -> Any:
    """Latents and natural LSEs, in float64; P is quantised if an alteration says how."""
    stages = frozenset[str]() if alteration is None else frozenset({"quantise"})
    return Altered(schedule, SM90, alteration or Alteration(), stages).decode(case)


def share_explained(answer: Answer, latent: NDArray[np.float64], noise: float = NOISE) -> float:
    """The share of latents within half a unit of the output's type, and noise, of these."""
    top = np.abs(latent).max(axis=-1, keepdims=True)
    unit = ulp_of(latent, 2) if answer.is_bf16 else np.zeros_like(latent)
    allowed = 0.5 * unit + noise * top
    with np.errstate(invalid="ignore"):
        return float(np.mean(np.abs(answer.latent - latent) <= allowed))


def _best(scores: dict[Any, float]) -> list[Any]:
    """The candidates that explain nearly all, as well as the best does."""
    best = max(scores.values())
    return [c for c, s in scores.items() if s >= max(EXPLAINS, best - AS_GOOD)]


def _table(scores: dict[Any, float], show: int = 6) -> tuple[str, ...]:
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return tuple(f"{name} explains {score:.2%}" for name, score in ranked[:show])


def _agreed(values: Sequence[Any]) -> str:
    """The value that all share, or `undetermined` if they differ."""
    different = list(dict.fromkeys(map(str, values)))
    if len(different) == 1:
        return different[0]
    return f"{UNDETERMINED}: {' or '.join(different)}"


# The questions, in the order they are asked


def lse_base(subject: Subject) -> Asked:
    """The LSE's base."""
    case = probe_cases.normal(2, 96)
    got, want = subject.ask(case).lse, _exact(case)[1]
    gaps = {
        "natural": float(np.max(np.abs(got - want))),
        "base 2": float(np.max(np.abs(got - want / LN_2))),
    }
    evidence = tuple(f"{name}: off by {gap:.2e} at most" for name, gap in gaps.items())
    name = min(gaps, key=lambda k: gaps[k])
    # A row's LSE is about 5: bases differ by 2, roundings and quantised sums by less than 0.1.
    if not gaps[name] < 0.1:
        return [Finding("LSE base", f"{UNDETERMINED}: neither fits", evidence)], subject
    base: Base = "2" if name == "base 2" else "e"
    return [Finding("LSE base", name, evidence)], replace(subject, base=base)


def keys_counted(subject: Subject) -> Asked:
    """Whether every key of a row counts."""
    lse = subject.natural(subject.ask(probe_cases.equal_keys()).lse)
    counted = np.exp(lse)
    missing = np.array(probe_cases.COUNTS)[:, None] - counted
    evidence = tuple(
        f"{n} equal keys: {np.min(got):.3f} to {np.max(got):.3f} counted"
        for n, got in zip(probe_cases.COUNTS, counted, strict=True)
    )
    question, last = "keys counted", float(np.max(np.abs(missing[-1])))
    if np.all(np.abs(missing) < 0.1):
        return [Finding(question, "all", evidence)], subject
    if not np.all(np.isfinite(counted)) or abs(last - round(last)) > 0.1:
        return [Finding(question, f"{UNDETERMINED}: no whole numbers", evidence)], subject
    word = "few" if np.max(missing[-1]) > 0 else "many"
    answer = f"not all: {round(last)} too {word} of {probe_cases.COUNTS[-1]}"
    return [Finding(question, answer, evidence)], subject


def empty_row(subject: Subject) -> Asked:
    """What a row without keys gives."""
    case = probe_cases.normal(4, 32)
    none = replace(case, valid=np.array([32, 0, 32, 0], np.int32))
    answer = subject.ask(none)
    lse, latent = answer.lse[[1, 3]], answer.latent[[1, 3]]
    values = sorted({float(x) for x in lse.ravel()}, key=str)
    rows = "0" if np.all(latent == 0) else "NaN" if np.all(np.isnan(latent)) else "other values"
    evidence = [f"LSEs {', '.join(f'{v:g}' for v in values)}; {np.sum(latent != 0)} latents not 0"]
    if len(values) > 1 or rows == "other values":
        why = "its elements differ: perhaps they are not written"
        return [Finding("empty row", f"{UNDETERMINED}: {why}", tuple(evidence))], subject
    value = values[0]
    like = [
        c.name
        for c in CONVENTIONS
        if c.base == subject.base and c.empty and np.float32(c.empty[0]) == np.float32(value)
    ]
    if like:
        evidence.append(f"as {', '.join(like)}")
    return [Finding("empty row", f"LSE {value:g}, row {rows}", tuple(evidence))], subject


def logits(subject: Subject) -> Asked:
    """What the logits are rounded to."""
    case = probe_cases.single_keys()
    lse = subject.natural(subject.ask(case).lse)
    want = _exact(case)[1]
    worst = float(np.max(np.abs(lse / want - 1)))
    evidence = (f"logits of 13 bits are off by {worst:.2e} of their size at most",)
    kinds: tuple[tuple[float, str, Any], ...] = (
        (2.0**-16, "FP32, or 16 bits at least", "fp32"),
        (2.0**-10, "FP16", "fp16"),
        (2.0**-7.9, "BF16", "bf16"),
    )
    for limit, name, form in kinds:
        if worst < limit:
            found = replace(subject.found, logits=form)
            return [Finding("logits", name, evidence)], replace(subject, found=found)
    return [Finding("logits", f"{UNDETERMINED}: off by more than BF16", evidence)], subject


def accumulation(subject: Subject) -> Asked:
    """How many bits a matrix product keeps below its largest term."""
    lse = subject.natural(subject.ask(probe_cases.alignment()).lse)
    want = LN_2 * 2.0 ** (26.0 - np.array(probe_cases.ALIGNMENTS))
    kept = np.all(np.abs(lse / want[:, None] - 1) < 0.01, axis=1)
    question, count = "accumulation of QK", int(np.argmin(kept)) if not kept.all() else len(kept)
    if not count:
        why = f"{UNDETERMINED}: 2^16 - 2^16 + 2^{16 - probe_cases.ALIGNMENTS[0]} is lost"
        return [Finding(question, why, ())], replace(subject, excess=_excess(subject)[0])
    bits = probe_cases.ALIGNMENTS[count - 1]
    evidence = [f"2^16 - 2^16 + 2^{16 - bits} gives its logit"]
    if count < len(kept):
        evidence.append(f"2^16 - 2^16 + 2^{15 - bits} does not")
    more = "" if count < len(kept) else " or more"
    known = replace(subject, bits=bits, excess=_excess(subject)[0])
    return [Finding(question, f"{bits} bits below the largest term{more}", tuple(evidence))], known


def _excess(subject: Subject) -> tuple[float, str]:
    """What is lost, beyond the output's rounding, where large parts of a row cancel."""
    case = probe_cases.cancelling_parts()
    answer, want = subject.ask(case), _exact(case)[0]
    if not answer.latent.any():
        return float("inf"), "parts of about 0.5 cancel; the answer is zero throughout"
    unit = 0.5 * ulp_of(want, 2) if answer.is_bf16 else 0.0
    excess = float(np.max(np.maximum(np.abs(answer.latent - want) - unit, 0)))
    return excess, f"parts of about 0.5 cancel; {excess:.2e} is lost beyond the output's rounding"


_FORMATS: tuple[tuple[PFormat, tuple[float, ...]], ...] = (
    ("fp32", (1.0, 448.0)),
    ("bf16", (1.0, 448.0)),
    ("fp16", (1.0, 448.0)),
    ("e4m3", (1.0, 240.0, 256.0, 447.0, 448.0)),
    ("e5m2", (1.0, 448.0, 57344.0)),
)
_SUMS = {"p": "P before its rounding", "quantised": "P after its rounding"}
_ROUNDINGS = {"rn": "to nearest", "rz": "toward zero"}


def numerators(subject: Subject) -> Asked:
    """What P is rounded to, at which scale, how, and which P is summed."""
    case = probe_cases.levels_of_p()
    answer = subject.ask(case)
    lse = subject.natural(answer.lse)
    scores: dict[Alteration, float] = {}
    for made in _numerators(subject.found):
        latent, want = _exact(case, made)
        fits = np.abs(lse - want) <= 4e-6 * np.maximum(1, np.abs(want))
        explained = share_explained(answer, latent, subject.noise)
        scores[made] = min(explained, float(np.mean(fits)))
    best = _best(scores)
    evidence = _table({_words(c): s for c, s in scores.items()})
    questions = ("P's format", "P's scale", "P's rounding", "what is summed")
    if not best:
        why = f"{UNDETERMINED}: no candidate explains {EXPLAINS:.0%}"
        return [Finding(q, why, evidence) for q in questions], subject
    scale = ["normalised" if c.p_max == "lse" else f"{c.p_scale:g}" for c in best]
    answers = (
        _agreed([c.p_format.upper() for c in best]),
        _agreed(scale),
        _agreed([_ROUNDINGS[c.p_rounding] for c in best]),
        _agreed([_SUMS[c.summed] for c in best]),
    )
    known = len({c.p_format for c in best}) == len({(c.p_scale, c.p_max) for c in best}) == 1
    found = [Finding(q, a, evidence) for q, a in zip(questions, answers, strict=True)]
    return found, replace(subject, found=best[0], p_known=known)


def _numerators(found: Alteration) -> list[Alteration]:
    """The candidates."""
    made = []
    for form, scales in _FORMATS:
        for scale, rounding, summed in itertools.product(
            scales, _ROUNDINGS if form == "e4m3" else ("rn",), _SUMS
        ):
            changes: Any = {"p_rounding": rounding, "summed": summed, "p_max": "row"}
            made.append(replace(found, p_format=form, p_scale=scale, **changes))
        changes = {"p_max": "lse", "p_scale": 1.0}
        made.append(replace(found, p_format=form, **changes))
    return made


def _words(c: Alteration) -> str:
    rounding = ", truncated" if c.p_rounding == "rz" else ""
    scale = "normalised" if c.p_max == "lse" else f"at {c.p_scale:g}"
    return f"{c.p_format.upper()} {scale}{rounding}, sum of {_SUMS[c.summed]}"


def division(subject: Subject) -> Asked:
    """Whose max P is relative to, and how a row's keys are divided."""
    questions = ("P's max", "split of 1024 keys")
    if not subject.p_known or subject.found.p_format not in ("e4m3", "e5m2"):
        why = f"{UNDETERMINED}: only a coarse P shows it"
        return [Finding(q, why, ()) for q in questions], subject
    if subject.found.p_max == "lse":
        return [Finding(questions[0], "none: P is normalised", ())], subject
    case = probe_cases.moving_max()
    answer = subject.ask(case)
    scores: dict[tuple[Any, str, int], float] = {}
    for name, p_max, schedule in _divisions():
        latent, _ = _exact(case, replace(subject.found, p_max=p_max), schedule)
        key = (p_max, name, schedule.split)
        scores[key] = share_explained(answer, latent, subject.noise)
    best = _best(scores)
    evidence = _table({f"{_MAXIMA[m]}, {name}": s for (m, name, _), s in scores.items()})
    if not best:
        why = f"{UNDETERMINED}: no candidate explains {EXPLAINS:.0%}"
        return [Finding(q, why, evidence) for q in questions], subject
    split = _agreed([name for _, name, _ in best])
    parts = {n for _, _, n in best}
    found = [
        Finding(questions[0], _agreed([_MAXIMA[m] for m, _, _ in best]), evidence),
        Finding(questions[1], split, evidence),
    ]
    return found, replace(subject, parts=parts.pop() if len(parts) == 1 else 0)


_MAXIMA = {
    "running": "max of the part's keys so far",
    "cta": "max of the part's keys",
    "row": "max of the row's keys",
}


def _divisions() -> list[tuple[str, Any, Schedule]]:
    """Candidates: a name, whose max, and a schedule."""
    found: list[tuple[str, Any, Schedule]] = []
    found.append((f"{UNDETERMINED}: the max does not depend on it", "row", WHOLE))
    for split, deal in itertools.product((1, 2, 4, 8), (0, 8, 64)):
        if split == 1 and deal:
            continue
        how = f"dealt in runs of {deal}" if deal else "consecutive"
        for chunk in (32, 64, 128):
            name = f"{split} parts, {how}, chunks of {chunk}"
            found.append((name, "running", Schedule(split=split, chunk=chunk, deal=deal)))
        if split > 1:
            whole = Schedule(split=split, chunk=1024, deal=deal)
            found.append((f"{split} parts, {how}", "cta", whole))
    return found


def partials(subject: Subject) -> Asked:
    """The type of the parts that a split row is merged from."""
    excess, words = _excess(subject)
    answer = f"{UNDETERMINED}: too much is lost, or it is no number"
    if excess < 2.0**-16:
        one = "FP32, or there are no parts"
        answer = "FP32" if subject.parts > 1 else f"{UNDETERMINED}: {one}"
    elif subject.bits and subject.bits < 20:
        answer = f"{UNDETERMINED}: products of {subject.bits} bits lose as much"
    elif excess < 2.0**-12:
        answer = "FP16"
    elif excess < 2.0**-7:
        answer = "BF16"
    return [Finding("partials", answer, (words,))], subject


def out_rounding(subject: Subject) -> Asked:
    """How often and which way the output is rounded to BF16."""
    case = probe_cases.out_roundings()
    answer = subject.ask(case)
    if not answer.is_bf16:
        size = answer.latent_bits.itemsize
        return [Finding("output", f"not BF16: {size} bytes an element", ())], subject
    names = {
        "once": "BF16, rounded once, to nearest",
        "twice": "BF16, rounded before the V scale and after it",
        "rz": "BF16, truncated",
    }
    scores = {}
    for out, name in names.items():
        changes: Any = {"out": out}
        latent, _ = Altered(WHOLE, SM90, replace(subject.found, **changes)).decode(case)
        scores[name] = float(np.mean(bf16.decode(latent) == answer.latent))
    best = _best(scores)
    found = _agreed(best) if best else f"{UNDETERMINED}: no candidate explains {EXPLAINS:.0%}"
    return [Finding("output", found, _table(scores))], subject


def dependence(subject: Subject) -> Asked:
    """Whether a row gives the same bits again, and alone the bits that it gives in a batch."""
    case = probe_cases.normal(64, 256)
    first, second = subject.ask(case), subject.ask(case)
    again = _differing(first, second, slice(None), slice(None))
    total = first.latent.size + first.lse.size
    findings = [
        Finding(
            "run to run",
            "the same bits" if not again else "other bits",
            (f"{again:,} of {total:,} elements differ",),
        )
    ]
    alone = size = 0
    for b in range(0, case.batch, 13):
        one = subject.ask(case.row(b))
        alone += _differing(one, first, slice(None), slice(b, b + 1))
        size += one.latent.size + one.lse.size
    findings.append(
        Finding(
            "row alone and in a batch of 64",
            "the same bits" if not alone else "other bits: its split or tiles depend on the batch",
            (f"{alone:,} of {size:,} elements differ",),
        )
    )
    return findings, subject


def _differing(a: Answer, b: Answer, of_a: slice, of_b: slice) -> int:
    return int(
        np.sum(a.latent_bits[of_a] != b.latent_bits[of_b])
        + np.sum(a.lse_bits[of_a] != b.lse_bits[of_b])
    )


def _answers(subject: Subject, case: Case) -> bool:
    try:
        subject.ask(case)
    except Exception:  # another's kernel may raise anything
        return False
    return True


def invalid_ids(subject: Subject) -> Asked:
    """What an id outside the cache does. This is asked last, because it may end a kernel."""
    plain = probe_cases.normal(2, 96)
    total, findings = len(plain.kv), []
    answers_plainly = _answers(subject, plain)
    for name, value in (("-1", -1), ("N", total), ("2^31 - 1", 2**31 - 1), ("-2^31", -(2**31))):
        case = probe_cases.with_ids(plain, PLACES, value)
        try:
            answer = subject.ask(case)
        except Exception as error:  # another's kernel may raise anything
            raised = f"raises {type(error).__name__}"
            # A kernel that raises at valid ids as well says nothing about these.
            answer_text = raised if answers_plainly else f"{UNDETERMINED}: it {raised}"
            evidence = (str(error).split("\n")[0],)
            findings.append(Finding(f"id {name}", answer_text, evidence))
            continue
        findings.append(_id_finding(f"id {name}", subject.natural(answer.lse), case, plain))
    return findings, subject


def _id_finding(question: str, lse: NDArray[np.float64], case: Case, plain: Case) -> Finding:
    """Decide by the LSE: no rounding of P changes it as much as 32 keys of 96 do."""
    at = {"attends to row 0": 0, "attends to the last row": len(plain.kv) - 1}
    meant = {"is masked": case}
    meant |= {name: probe_cases.with_ids(plain, PLACES, value) for name, value in at.items()}
    gaps = {name: float(np.max(np.abs(lse - _exact(c)[1]))) for name, c in meant.items()}
    evidence = tuple(f"{name}: LSE off by {gap:.2e}" for name, gap in gaps.items())
    best = min(gaps, key=lambda k: gaps[k])
    if not gaps[best] < 0.02:
        return Finding(question, f"{UNDETERMINED}: it does none of these", evidence)
    return Finding(question, best, evidence)


QUESTIONS: tuple[Question, ...] = (
    lse_base,
    keys_counted,
    empty_row,
    logits,
    accumulation,
    numerators,
    division,
    partials,
    out_rounding,
    dependence,
    invalid_ids,
)


def identify(
    kernel: Kernel,
    questions: Sequence[Question] = QUESTIONS,
    advance: Callable[[str], None] = lambda name: None,
) -> tuple[Finding, ...]:
    """Ask a kernel questions. If it raises, the answer is undetermined, with what it raised."""
    subject = Subject(kernel)
    findings: list[Finding] = []
    for question in questions:
        try:
            found, subject = question(subject)
        except Exception as error:  # another's kernel may raise anything
            about = (question.__doc__ or "").rstrip(".")
            why = f"{UNDETERMINED}: it raises {type(error).__name__}"
            found = [Finding(about, why, (str(error).split("\n")[0],))]
        findings += found
        advance(question.__name__)
    return tuple(findings)
