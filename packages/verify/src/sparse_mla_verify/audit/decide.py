"""Which claims an audit decides, and which it leaves out and why."""

from types import MappingProxyType

from sparse_mla_verify.audit import claims
from sparse_mla_verify.evidence.evidence import RECORDED, Evidence
from sparse_mla_verify.inputs.cases import FAMILIES
from sparse_mla_verify.push import lse_counterfactuals

# Claims that one family alone can decide. While a recording that ships lacks it, the audit of that
# recording leaves the claim out, by name; a run on a GPU takes family and claim.
NEEDS = MappingProxyType({"p-saturates": "huge-logits"})


# Claims that the recordings of push mode decide, wherever the audit runs. They are of the base
# schedule and are looked at in an audit of all its families.
PUSH = ("pushed-steps", "same-push-code", lse_counterfactuals.CLAIM)


def left_out(evidence: Evidence) -> dict[str, str]:
    """The claims that are left out, with the reason.

    Those that need a pending family which a recording lacks, those about push mode in an audit of
    less than all families of the base schedule, and the one about guarded caches in an audit of
    less than all families.
    """
    held = {c.case.family for c in evidence.cases}
    waiting = {
        name: f"until the family {family} is recorded"
        for name, family in NEEDS.items()
        if evidence.source == RECORDED and FAMILIES[family].pending and family not in held
    }
    if evidence.push is None:
        waiting |= dict.fromkeys(PUSH, "for an audit of the whole base schedule")
    if evidence.guarded is None:
        waiting[claims.UNREAD] = "for an audit of all families"
    return waiting


def decide(evidence: Evidence) -> list[tuple[claims.Claim, claims.Verdict]]:
    """Every claim with its verdict, but those that are left out."""
    absent = left_out(evidence)
    return [(c, c.decide(evidence)) for c in claims.all_claims() if c.name not in absent]
