"""A short run of the kernel alone, for compute-sanitizer.

    compute-sanitizer --tool TOOL --error-exitcode 9 python -m sparse_mla_verify sanitize

with memcheck, racecheck and synccheck for TOOL.

Few rows of each kind: a row over several chunks, masked ids, no keys, fewer heads than the buffers
hold. Nothing is compared; that is the audit's work.
"""

from collections.abc import Sequence

from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.inputs.cases import Case, all_cases
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.terminal.options import parser

# Case -> the rows of it that run.
ROWS = {
    "counts/edges": (0, 1, 3, 6, 12, 14),
    "invalid-ids/places": (0, 5, 10, 15, 19, 23, 24, 25),
    "padded-heads/mailbox": (0, 2),
    "nan-used/keys-and-query": (0, 2),
    "head-counts/32": (3,),
    "rising-max/every-chunk": (0,),
    "many-keys/chunks": (1, 5, 11),
}


def short_cases(schedule: str = BASE) -> list[Case]:
    """The rows of `ROWS`, as cases of their own."""
    chosen = all_cases(sorted({name.split("/")[0] for name in ROWS}), schedule)
    return [case.only(ROWS[case.name]) for case in chosen if case.name in ROWS]


def main(arguments: Sequence[str] = ()) -> int:
    """Run every short case once on each schedule; 0 when all ran, 2 without a GPU."""
    parser("sanitize", __doc__).parse_args(arguments)
    if lacks_gpu("sanitize"):
        return 2
    from sparse_mla_verify.gpu_runs.gpu import GpuRunner
    from sparse_mla_verify.measure.poisoned import poisoned

    runner = GpuRunner()
    for schedule in REFERENCE:
        for case in short_cases(schedule):
            runner(case, *poisoned(case, "NaN"))
            cubin = runner.artifacts[case.signature.key].code_sha256
            print(f"{schedule}, {case.name}: {case.tiles} tiles ran of {cubin}", flush=True)
    return 0
