"""What the claims and the case families are: `list` and `explain`."""

import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sparse_mla_verify.audit import claims
from sparse_mla_verify.inputs.cases import FAMILIES
from sparse_mla_verify.terminal.options import parser


def list_all(arguments: Sequence[str]) -> int:
    """Print every claim and every case family."""
    parser("list", "List the claims and the case families.").parse_args(arguments)
    console = Console()
    table = Table("claim", "stage", "decided by", "statement", title="Claims", title_justify="left")
    for claim in claims.all_claims():
        table.add_row(claim.name, claim.stage, claim.kind, claim.statement)
    console.print(table)
    table = Table("family", "cases", "tiles", "what", title="Families", title_justify="left")
    for family in FAMILIES.values():
        cases = family.build()
        tiles = sum(case.tiles for case in cases)
        table.add_row(family.name, str(len(cases)), f"{tiles:,}", family.about)
    console.print(table)
    return 0


def explain(arguments: Sequence[str]) -> int:
    """Print one claim in full. Returns 2 for a name that is not a claim's."""
    commands = parser("explain", "Say what a claim means, how it is decided, what refutes it.")
    commands.add_argument("claim", help="a name that `list` shows")
    options = commands.parse_args(arguments)
    found = {c.name: c for c in claims.all_claims()}
    if options.claim not in found:
        print(f"claim must be one of {', '.join(found)}, got {options.claim!r}", file=sys.stderr)
        return 2
    claim = found[options.claim]
    print(f"{claim.name} ({claim.kind}; stage: {claim.stage})")
    print(textwrap.fill(claim.statement, 88, initial_indent="  ", subsequent_indent="  "))
    if not claim.counterfactuals:
        return 0
    if claim.kind == "fault":
        print("It holds if no decode faults, but a kernel does fault that")
    else:
        print("It holds if the bits are the contract's, and differ from those of a kernel that")
    for c in claim.counterfactuals:
        print(f"  {c.about}  [{c.name}; on {', '.join(c.data)}]")
    return 0
