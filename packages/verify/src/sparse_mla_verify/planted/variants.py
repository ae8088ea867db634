"""Broken variants of the base kernel: does the audit catch each, and does `identify` name it?

    sparse-mla-audit variants --out DIR

Each variant is a source patch of one line in a copy of the kernel's package in a temporary folder,
which is gone at the end. A process of its own imports the copy, runs a few cases on the GPU, holds
them against the reference and against the counterfactual that the variant is, and asks the
questions that tell. A patch whose line isn't there once is an error, not a variant.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparse_mla_verify.audit import claims
from sparse_mla_verify.black_box.adapters import ours
from sparse_mla_verify.black_box.identify import QUESTIONS, identify
from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.evidence.evidence import (
    LIVE,
    Evidence,
    live_case,
    run_cases,
)
from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.inputs.cases import all_cases
from sparse_mla_verify.measure.predict import assess
from sparse_mla_verify.models import counterfactuals
from sparse_mla_verify.processes.patched_kernel import copied_package, environment, replaced
from sparse_mla_verify.terminal.options import one_or_more, parser

JUDGED_CASES = ("head-counts/16", "heavy-tailed/checkpoint", "normal/checkpoint")
TIMEOUT_S = 300
JUDGE = "--judge"  # what `run` asks of its process, with a variant's name; not for a person


@dataclass(frozen=True)
class Variant:
    """A patch: in `file`, `old` (found once) becomes `new`.

    `counterfactual` is the model that it should be, bit for bit, "" if there is none; `finding` the
    question and the answer that name it.
    """

    name: str
    file: str
    old: str
    new: str
    counterfactual: str
    finding: tuple[str, str]


VARIANTS = (
    Variant(
        "P scaled to 447",
        "arithmetic/softmax.py",
        "math.log2(448.0)",
        "math.log2(447.0)",
        "p-scale-447",
        ("P's scale", "447"),
    ),
    Variant(
        "P scaled to 256",
        "arithmetic/softmax.py",
        "math.log2(448.0)",
        "math.log2(256.0)",
        "p-scale-256",
        ("P's scale", "256"),
    ),
    Variant(
        "P truncated to E4M3's three fraction bits",
        "kernels/base/partial.py",
        "store_fp8_pair_shared(row + key, rP[0], rP[1])",
        "store_fp8_pair_shared(row + key, *[_cut(rP[i]) for i in range(2)])",
        "",
        ("P's rounding", "toward zero"),
    ),
    Variant(
        "sum of the quantised P",
        "kernels/base/softmax.py",
        "total = add_rn(rP[0], rP[1])  #",
        "total = add_rn(_quantised(rP[0]), _quantised(rP[1]))  #",
        "sum-quantised",
        ("what is summed", "P after its rounding"),
    ),
    Variant(
        "BF16 partials",
        "kernels/base/merge.py",
        "*[rAcc[2 * half + i, tile] for tile in range(PV_TILES)]",
        "*[_as_bf16(rAcc[2 * half + i, tile]) for tile in range(PV_TILES)]",
        "partials-bf16",
        ("partials", "BF16"),
    ),
    Variant(
        "base-2 LSE",
        "arithmetic/finish.py",
        "math.log(2.0)",
        "1.0",
        "lse-base-2",
        ("LSE base", "base 2"),
    ),
    Variant(
        "one key too few",
        "kernels/base/gather.py",
        "return begin, cutlass.min(n, begin + per)",
        "return begin, cutlass.max(begin, cutlass.min(n, begin + per) - 1)",
        "",
        ("keys counted", "not all: 4 too few of 1000"),
    ),
)

# What patched lines call; appended to the patched file.
_HELPERS = """

from cutlass.cute.arch import inline_ptx


def _unary(text, x):
    return inline_ptx(text, write_only_types=[Float32], read_only_args=[x])


@cute.jit
def _cut(x: Float32) -> Float32:
    return _unary(
        "{ .reg .b32 t; mov.b32 t, {$r0}; and.b32 t, t, 0xFFF00000; mov.b32 {$w0}, t; }", x
    )


@cute.jit
def _as_bf16(x: Float32) -> Float32:
    return _unary(
        "{ .reg .b16 h, z; .reg .b32 t; mov.b16 z, 0; cvt.rn.bf16.f32 h, {$r0}; "
        "mov.b32 t, {z, h}; mov.b32 {$w0}, t; }", x
    )


@cute.jit
def _quantised(x: Float32) -> Float32:
    return _unary(
        "{ .reg .b16 h, l, u; .reg .b32 t; .reg .f32 z; mov.f32 z, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 h, z, {$r0}; cvt.rn.f16x2.e4m3x2 t, h; "
        "mov.b32 {l, u}, t; cvt.f32.f16 {$w0}, l; }", x
    )
"""


def patched(variant: Variant, folder: Path) -> Path:
    """A copy of the kernel's package with the patch, in `folder`; the path to import from.

    Raises ValueError when the line to patch isn't there exactly once.
    """
    file = copied_package(folder) / variant.file
    where = f"{variant.name}: {variant.file}"
    source = replaced(file.read_text(), variant.old, variant.new, where)
    called = ("_cut(", "_as_bf16(", "_quantised(")
    helpers = _HELPERS if any(name in variant.new for name in called) else ""
    file.write_text(source + helpers)
    return folder


def judge(variant: Variant) -> dict[str, Any]:
    """Run the kernel that is imported here, as if it were the contract's; what the audit says."""
    from sparse_mla_verify.gpu_runs.gpu import GpuRunner

    cases = [c for c in all_cases() if c.name in JUDGED_CASES]
    outputs = run_cases(GpuRunner(), cases)
    found = tuple(
        live_case(c, o, assess(c, (o.latent, o.lse)))
        for c, o in ((c, outputs[c.name]) for c in cases)
    )
    trials = counterfactuals.try_all(found, "SM90", workers=1)
    evidence = Evidence(LIVE, None, found, {}, {}, trials=trials)
    verdicts = {c.name: c.decide(evidence) for c in claims.all_claims()}
    failed = [name for name, v in verdicts.items() if v.status is claims.Status.FAIL]
    named = {f.question: f for f in identify(ours, QUESTIONS[:-1])}
    question, answer = variant.finding
    trial = trials.get(variant.counterfactual)
    return {
        "variant": asdict(variant),
        "failed": failed,
        "caught": bool(failed),
        "tiles_differing": sum(e.tiles_differing for e in found),
        "tiles": sum(e.case.tiles for e in found),
        "is_the_counterfactual": trial.counterfactual_holds if trial else None,
        "named": named[question].answer == answer,
        "findings": {q: f.answer for q, f in named.items()},
    }


def run(variant: Variant) -> dict[str, Any]:
    """Patch, run in a process of its own, clean up."""
    with tempfile.TemporaryDirectory() as folder:
        judged = ["variants", JUDGE, variant.name]
        command = [sys.executable, "-m", "sparse_mla_verify", *judged]
        try:
            done = subprocess.run(
                command, env=environment(patched(variant, Path(folder))), capture_output=True,
                text=True, check=False, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"variant": asdict(variant), "error": f"not done in {TIMEOUT_S} s"}
    if done.returncode:
        return {"variant": asdict(variant), "error": done.stderr.strip()[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _in_order(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as `VARIANTS` lists them, whichever ended first."""
    names = [variant.name for variant in VARIANTS]
    return sorted(results, key=lambda result: names.index(result["variant"]["name"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Every variant; 0 if each is caught and named, 1 if one isn't."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [JUDGE]:
        print(json.dumps(judge(next(v for v in VARIANTS if v.name == given[1]))))
        return 0
    command = parser("variants", __doc__)
    command.add_argument(
        "--out", type=Path, required=True, help="folder for variants.json, made if need be"
    )
    command.add_argument("--jobs", type=one_or_more, default=1, help="variants at a time")
    options = command.parse_args(given)
    if lacks_gpu("variants"):
        return 2
    from sparse_mla_verify.gpu_runs import gpu

    machine = asdict(gpu.host())
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        # As they end: what is done is kept if a later one is cut off.
        for done in as_completed([pool.submit(run, variant) for variant in VARIANTS]):
            result = done.result()
            results.append(result)
            said = result.get("error") or (
                f"caught {result['caught']} ({', '.join(result['failed'])}), named "
                f"{result['named']}, counterfactual's bits {result['is_the_counterfactual']}"
            )
            print(f"{result['variant']['name']}: {said}", flush=True)
            record = {"machine": machine, "variants": _in_order(results)}
            json_files.write(options.out / "variants.json", record)
    good = [r for r in results if "error" not in r and r["caught"] and r["named"]]
    return 0 if len(good) == len(VARIANTS) else 1
