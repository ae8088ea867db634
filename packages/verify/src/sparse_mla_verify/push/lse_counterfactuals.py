"""The base of pushed LSEs: recorded steps against models in which the base is another.

A push recording has no bits. It says how many results of its steps were compared with those of the
simulated step, how many differed, and, by the hash `Check.expected`, what they were compared with.
If none differed, the kernels' bits are those of the simulated step, and each element for which a
model gives other bits rejects the model. Each case is decoded once. The models change what comes
after: the words that are pushed, and how their owner reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import BASE, SM90, arguments, mailbox, merge_states, owner_merge
from sparse_mla_reference.decode import decode_row
from sparse_mla_reference.lse import natural
from sparse_mla_verify.evidence.evidence import Trial
from sparse_mla_verify.evidence.push_recordings import PushRecording
from sparse_mla_verify.inputs.cases import LATENT
from sparse_mla_verify.models.counterfactuals import Counterfactual
from sparse_mla_verify.processes.workers import spread
from sparse_mla_verify.push.step_inputs import (
    BATCH,
    CYCLE,
    CYCLE_KEYS,
    GROUP_KEYS,
    StepBits,
    StepCase,
    cycle,
    joined,
    special,
    step_digest,
)

CLAIM = "lse-is-base-2-when-pushed"
STATEMENT = "In push mode the LSE words are in base 2, and the owner weights them in base 2."
GROUP_STEPS = 5  # of the steps between two GPUs, how many are decoded here


@dataclass(frozen=True)
class Steps:
    """Recorded steps that decide: the recording, its check, and the cases (or the first of them).

    `runs` is how many steps the check compared; `whole` is whether the cases are all of its inputs.
    """

    recording: str
    check: str
    ranks: int
    owner_heads: int
    runs: int
    cases: Callable[[int, int], Sequence[StepCase]]
    whole: bool = True

    @property
    def name(self) -> str:
        """The check and its recording."""
        return f"{self.check} of {self.recording}"

    @property
    def elements(self) -> int:
        """Latents and LSEs that the check compared."""
        return self.runs * self.ranks * BATCH * self.owner_heads * (LATENT + 1)

    def made(self) -> Sequence[StepCase]:
        """The cases."""
        return self.cases(self.ranks, self.owner_heads)


def _special(ranks: int, owner_heads: int) -> Sequence[StepCase]:
    return tuple(special(ranks, owner_heads))


def _cycled(ranks: int, owner_heads: int) -> Sequence[StepCase]:
    return cycle(CYCLE, ranks, owner_heads, most=CYCLE_KEYS)


def _of_a_group(ranks: int, owner_heads: int) -> Sequence[StepCase]:
    return cycle(GROUP_STEPS, ranks, owner_heads, most=GROUP_KEYS)


RECORDINGS = ONE_GPU, TWO_GPUS = "push_h200.json", "push_h200_x2.json"
STEPS = (
    Steps(ONE_GPU, "special/D=2 x 48 heads", 2, 48, 24, _special),
    Steps(ONE_GPU, "steps/D=8 x 12 heads", 8, 12, 42, _cycled),
    Steps(TWO_GPUS, "steps", 2, 48, 2000, _of_a_group, whole=False),
)

# What a rank sends, and what an owner makes of it, as `owner_merge` takes and gives them.
Merge = Callable[[NDArray[Any], NDArray[np.float32]], tuple[NDArray[Any], NDArray[Any]]]


def _in_base_e(lse2: NDArray[np.float32]) -> NDArray[np.float32]:
    empty = lse2 == mailbox.EMPTY_LSE
    return np.where(empty, lse2, np.asarray(natural(lse2, SM90), np.float32))


def _read_as_natural(
    payload: NDArray[Any], lse: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[Any]]:
    absent = np.where(lse == mailbox.EMPTY_LSE, np.float32(-np.inf), lse)
    row, merged = merge_states(payload, absent, base="e")
    return SM90.round_out(row), merged


def _pushed_natural(
    payload: NDArray[Any], lse2: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[Any]]:
    return owner_merge(payload, _in_base_e(lse2))


def _natural_throughout(
    payload: NDArray[Any], lse2: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[Any]]:
    return _read_as_natural(payload, _in_base_e(lse2))


_DATA = tuple(steps.name for steps in STEPS)
COUNTERFACTUALS: Mapping[str, tuple[Counterfactual, Merge]] = MappingProxyType(
    {
        c.name: (c, merge)
        for c, merge in (
            (
                Counterfactual(
                    "push-natural", CLAIM, "pushes natural LSEs to a base-2 merge", data=_DATA
                ),
                _pushed_natural,
            ),
            (
                Counterfactual(
                    "owner-natural", CLAIM, "weights pushed base-2 LSEs as natural ones", data=_DATA
                ),
                _read_as_natural,
            ),
            (
                Counterfactual(
                    "push-and-owner-natural",
                    CLAIM,
                    "pushes natural LSEs and weights them as such",
                    data=_DATA,
                ),
                _natural_throughout,
            ),
        )
    }
)


def pushed(case: StepCase) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """What the ranks push: payload `[D, B, heads, 512]` BF16 and LSEs `[D, B, heads]` in base 2.

    As the mailboxes hold them: no negative zero, `EMPTY_LSE` where nothing is sent.
    """
    query = mailbox.query_bytes(np.concatenate(case.query, axis=1))
    payload, lse2 = [], []
    for keys in zip(case.kv, case.rows, case.valid, strict=True):
        args = arguments.check(query, *keys, case.scale_log2, case.out_scale, BASE, SM90)
        rows = [decode_row(args, b, BASE, SM90) for b in range(len(query))]
        payload.append([mailbox.payload_bits(SM90.round_out(row.row)) for row in rows])
        lse2.append([mailbox.lse_words(row.lse2) for row in rows])
    encodings, words = np.array(payload, np.uint16), np.array(lse2, np.uint32)
    return encodings.view(ml_dtypes.bfloat16), words.view(np.float32)


def merged(merge: Merge, case: StepCase, sent: tuple[NDArray[Any], NDArray[Any]]) -> StepBits:
    """What the owners give for what was sent, in the form of a step's results; none dropped."""
    with np.errstate(all="ignore"):
        latent, lse = merge(*sent)
    dropped = np.zeros((case.ranks, case.ranks), np.int32)
    bits = latent.view(np.uint16), lse.astype(np.float32).view(np.uint32)
    return StepBits(_by_owner(bits[0], case.ranks), _by_owner(bits[1], case.ranks), dropped)


def _by_owner(x: NDArray[Any], ranks: int) -> NDArray[Any]:
    """`[B, heads, ...]` to `[D, B, H, ...]`."""
    split = x.reshape(len(x), ranks, -1, *x.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 1, 0))


@dataclass(frozen=True)
class Told:
    """A case's digest on the contract, and by model: rows that are its too, elements that tell."""

    digest: str
    rows: int
    elements: int
    same_rows: Mapping[str, int]
    telling: Mapping[str, int]


def told(case: StepCase) -> Told:
    """Decode a case and compare every model with the contract. Rows are those of an owner."""
    sent = pushed(case)
    contract = merged(owner_merge, case, sent)
    same, telling = {}, {}
    for name, (_, merge) in COUNTERFACTUALS.items():
        other = merged(merge, case, sent)
        latent, lse = other.latent != contract.latent, other.lse != contract.lse
        telling[name] = int(latent.sum()) + int(lse.sum())
        same[name] = int(np.sum(~latent.any(axis=(2, 3)) & ~lse.any(axis=2)))
    rows = case.ranks * len(case.rows[0])
    elements = contract.latent.size + contract.lse.size
    return Told(step_digest(contract), rows, elements, same, telling)


def try_all(
    recordings: Mapping[str, PushRecording],
    *,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Trial]:
    """Every model against the recorded steps, over processes; by name."""
    made = [(steps, case) for steps in STEPS for case in steps.made()]
    found: dict[int, Told] = {}
    for k, one in spread(told, [(case,) for _, case in made], workers):
        found[k] = one
        advance()
    by_steps: dict[str, list[Told]] = {steps.name: [] for steps in STEPS}
    for k, (steps, _) in enumerate(made):
        by_steps[steps.name].append(found[k])
    trials: dict[str, Trial] = {}
    for name in COUNTERFACTUALS:
        parts = [_trial(name, s, by_steps[s.name], recordings) for s in STEPS]
        trials[name] = sum(parts[1:], parts[0])
    return trials


def jobs() -> int:
    """How often `try_all` advances."""
    return sum(len(steps.made()) for steps in STEPS)


def _trial(
    name: str, steps: Steps, parts: Sequence[Told], recordings: Mapping[str, PushRecording]
) -> Trial:
    known = is_contract(steps, [part.digest for part in parts], recordings)
    rows = sum(part.rows for part in parts)
    return Trial(
        name,
        (steps.name,),
        tiles=rows,
        tiles_of_contract=rows if known else 0,
        tiles_of_counterfactual=sum(part.same_rows[name] for part in parts) if known else 0,
        elements=sum(part.elements for part in parts),
        telling=sum(part.telling[name] for part in parts) if known else 0,
    )


def is_contract(
    steps: Steps, digests: Sequence[str], recordings: Mapping[str, PushRecording]
) -> bool:
    """Whether the recording says that the kernels' bits are those with these digests.

    Of steps that are not decoded whole, it says so by counts alone.
    """
    recording = recordings.get(steps.recording)
    found = [c for c in recording.checks if c.name == steps.check] if recording else []
    if len(found) != 1 or not found[0].same or found[0].elements != steps.elements:
        return False
    return not steps.whole or found[0].expected == joined(digests)
