"""Is an id outside the cache ever read? `sparse-mla-audit guarded --out FILE`.

The cache fills a mapped range of device memory exactly, and nothing is mapped on either side. An id
outside the cache points to memory where a read faults. Each schedule decodes cases with such ids,
and the reference predicts the bits. The same kernels show that a read does fault: a kernel that
gets as its cache the one row that such an id points to reads the row, and must fault.

A fault ends a process's use of the GPU, so that each fault is provoked in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparse_mla_verify.evidence.guarded_recordings import (
    EVERY_ID,
    NEAREST,
    GivenRow,
    GuardedRecording,
    GuardedRun,
    Layout,
    holds,
    row_digests,
    said,
)
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.inputs.cases import COLUMNS, Case
from sparse_mla_verify.inputs.guarded_cases import (
    MAPPED,
    MORE_ROWS,
    OUTSIDE,
    OUTSIDE_CACHE,
    ROWS,
    SHAPES,
    UNNAMED,
    guarded_case,
    unnamed,
)
from sparse_mla_verify.inputs.schedules import REFERENCE, kernel_schedule
from sparse_mla_verify.measure.bits import compare_bits
from sparse_mla_verify.measure.predict import Bits, predict
from sparse_mla_verify.processes.workers import one_thread_each, processes
from sparse_mla_verify.terminal.options import one_or_more, parser

TIMEOUT_S = 120


# In a process of its own, on the GPU


def trial(schedule: str, given: int | None, folder: Path) -> None:
    """One process's work; it leaves `trial.json` in a folder, and the outputs' bits.

    With an id, the kernel gets as its cache the row that the id points to. Without an id, it gets
    rows that are mapped, which must not fault, and then the cases run.
    """
    from sparse_mla_verify.gpu_runs.gpu import host

    cache, layout = _mapped()
    names = list(SHAPES)
    found: dict[str, Any] = {
        "layout": asdict(layout),
        "given_rows": [],
        "machine_code": {},
        "runs": [],
    }
    if given is not None:
        name = names[OUTSIDE.index(given) % len(names)]
        found["given_rows"].append(asdict(_given_row(cache, guarded_case(name, schedule), given)))
    else:
        found["host"] = asdict(host())
        for id_ in (0, ROWS - 1):
            case = guarded_case(names[0], schedule)
            found["given_rows"].append(asdict(_given_row(cache, case, id_)))
        for name in names:
            case = guarded_case(name, schedule)
            found["machine_code"][case.signature.key], runs = _runs(cache, case, folder)
            found["runs"] += map(asdict, runs)
            if runs[-1].error:
                break
    (folder / "trial.json").write_text(json.dumps(found))


def _mapped() -> tuple[Any, Layout]:
    """The cache's memory, amid as many reserved addresses as ids can name, or fewer if need be."""
    from sparse_mla_verify.gpu_runs.unmapped import MappedRange

    try:
        side, cache = EVERY_ID, MappedRange(MAPPED, EVERY_ID, EVERY_ID)
    except RuntimeError:
        side, cache = NEAREST, MappedRange(MAPPED, NEAREST, NEAREST)
    return cache, Layout(ROWS, MAPPED, side, side)


def _given_row(cache: Any, case: Case, id_: int) -> GivenRow:
    from sparse_mla_verify.gpu_runs.gpu import Inputs
    from sparse_mla_verify.gpu_runs.launch_checks import Outputs
    from sparse_mla_verify.gpu_runs.unmapped import SUCCESS, finished

    inputs = Inputs(replace(case, kv=case.kv[:1], rows=np.zeros_like(case.rows)))
    outputs = Outputs(case, "cuda")
    inputs.kv = cache.tensor(1, COLUMNS, id_ * COLUMNS)
    access = cache.access(id_ * COLUMNS)
    inputs.launch(outputs.latent, outputs.lse)
    status = finished()
    error = "" if status == SUCCESS else status
    return GivenRow(case.schedule, id_, 0 <= id_ < ROWS, access, error)


def _runs(cache: Any, case: Case, folder: Path) -> tuple[str, list[GuardedRun]]:
    """A case as it is, and with rows that no list names: the machine code's hash and the runs.

    The bits go to the folder. Nothing runs after an error.
    """
    from sparse_mla_verify.gpu_runs.gpu import Inputs, on_device
    from sparse_mla_verify.gpu_runs.launch_checks import Outputs
    from sparse_mla_verify.gpu_runs.unmapped import SUCCESS, finished

    inputs = Inputs(case)
    cache.tensor(ROWS, COLUMNS).copy_(inputs.kv)
    sha256, runs = inputs.kernel.artifact.code_sha256, []
    for given, told, length in (
        (OUTSIDE_CACHE, case, ROWS),
        (UNNAMED, unnamed(case), ROWS + MORE_ROWS),
    ):
        outputs = Outputs(case, "cuda")
        outputs.poison()
        inputs.rows = on_device(told.rows, "cuda")
        inputs.kv = cache.tensor(length, COLUMNS)
        inputs.launch(outputs.latent, outputs.lse)
        status = finished()
        error = "" if status == SUCCESS else status
        run = GuardedRun(
            case.schedule, case.name, given, case.signature.key, told.digest(), error=error
        )
        runs.append(run)
        if error:
            break
        latent, lse = outputs.bits()
        np.savez(folder / _file_of(run), latent=latent, lse=lse)
    return sha256, runs


def _file_of(run: GuardedRun) -> str:
    return f"{run.case.replace('/', '-')}-{run.given.replace(' ', '-')}.npz"


# All processes


def compile_one(name: str, schedule: str, arch: str) -> None:
    """Compile a case's kernel into the cache."""
    from sparse_mla_kernel import precompile_sparse

    shape = SHAPES[name]
    batch = len(shape.counts)
    sizes = (batch, shape.heads, shape.heads, shape.width, batch, arch)
    precompile_sparse(*sizes, schedule=kernel_schedule(schedule))


def predict_row(name: str, schedule: str, row: int) -> Bits:
    """The encodings of a row of a case: latent `[1, heads, 512]` and lse `[1, heads]`."""
    return predict(guarded_case(name, schedule).row(row))


def run_all(arch: str, workers: int | None = None) -> GuardedRecording:
    """Every schedule, case and id, over processes.

    Raises RuntimeError if a process ended without an answer.
    """
    most = workers or os.cpu_count() or 1
    pairs = list(product(REFERENCE, SHAPES))
    with one_thread_each(), processes(most) as pool, ThreadPoolExecutor(most) as threads:
        # FP16 schedules and many rows take longest.
        compiled = [pool.submit(compile_one, name, s, arch) for s, name in reversed(pairs)]
        predicted = {
            (s, name): [pool.submit(predict_row, name, s, r) for r in range(batch)]
            for name in reversed(SHAPES)
            for s in REFERENCE
            for batch in (len(SHAPES[name].counts),)
        }
        for future in compiled:
            future.result()
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(s, given) for given in (None, *OUTSIDE) for s in REFERENCE]
            work = [
                threads.submit(_in_a_process, s, given, Path(folder) / str(k))
                for k, (s, given) in enumerate(jobs)
            ]
            found = [future.result() for future in work]
            return _gathered(found, predicted, Path(folder))


def _in_a_process(schedule: str, given: int | None, folder: Path) -> Mapping[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "sparse_mla_verify", "guarded", "--schedule", schedule]
    command += ["--into", str(folder), *([] if given is None else [f"--given={given}"])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        said = (done.stderr or done.stdout).strip()[-2000:]
    except subprocess.TimeoutExpired:
        said = f"nothing in {TIMEOUT_S} s"
    answer = folder / "trial.json"
    if not answer.exists():
        raise RuntimeError(
            f"the process of {schedule}, id {given} must leave an answer, got none: {said}"
        )
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _gathered(
    found: Sequence[Mapping[str, Any]],
    predicted: Mapping[tuple[str, str], Sequence["Future[Bits]"]],
    folder: Path,
) -> GuardedRecording:
    expected: dict[tuple[str, str], Bits] = {}
    for key, rows in predicted.items():
        latent, lse = zip(*(row.result() for row in rows), strict=True)
        expected[key] = np.concatenate(latent), np.concatenate(lse)
    runs: list[GuardedRun] = []
    machine_code: dict[str, str] = {}
    for k, one in enumerate(found):
        machine_code |= one["machine_code"]
        for plain in one["runs"]:
            run = GuardedRun(**plain)
            wanted = expected[run.schedule, run.case]
            runs.append(run if run.error else _compared(run, folder / str(k), wanted))
    layout = min((Layout(**one["layout"]) for one in found), key=lambda reserved: reserved.before)
    given = tuple(GivenRow(**row) for one in found for row in one["given_rows"])
    return GuardedRecording(Host(**found[0]["host"]), layout, machine_code, tuple(runs), given)


def _compared(run: GuardedRun, folder: Path, expected: Bits) -> GuardedRun:
    with np.load(folder / _file_of(run)) as stored:
        bits: Bits = stored["latent"], stored["lse"]
    what = f"{run.schedule}, {run.case}, {run.given}"
    parts = (
        compare_bits(f"{what}, latent", bits[0], expected[0]),
        compare_bits(f"{what}, lse", bits[1], expected[1]),
    )
    return replace(
        run,
        elements=sum(p.elements for p in parts),
        differing=sum(p.differing for p in parts),
        digests=row_digests(bits),
        first=next((str(p) for p in parts if p.differing), ""),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all and write a recording; 0 if nothing outside the cache was read and no bit differs.

    2 without a GPU. With `--into`, one process's work.
    """
    commands = parser("guarded", __doc__)
    commands.add_argument("--out", type=Path, help="the JSON file to write")
    commands.add_argument("--workers", type=one_or_more, help="processes (all cores unless said)")
    commands.add_argument("--into", type=Path, help=SUPPRESS)
    commands.add_argument("--schedule", choices=tuple(REFERENCE), help=SUPPRESS)
    commands.add_argument("--given", type=int, choices=OUTSIDE, help=SUPPRESS)
    options = commands.parse_args(arguments)
    if options.into:
        trial(options.schedule, options.given, options.into)
        sys.stdout.flush()
        os._exit(0)  # a context that faulted is left as it is
    began = time.perf_counter()
    if lacks_gpu("guarded"):
        return 2
    from sparse_mla_verify.gpu_runs.gpu import host

    recording = run_all(f"{host().arch}a", options.workers)
    if options.out:
        recording.save(options.out)
    for line in said(recording):
        print(line)
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if holds(recording) else 1
