"""Is an id outside the cache ever read? `python -m sparse_mla_verify.gpu_runs.guarded --out FILE`.

The cache is exactly a mapped range of device memory, amid addresses at which there is none: the row
that such an id would name lies where a read faults. Each schedule decodes cases with these ids, and
the reference says what bits it must give. That a read would be seen is shown by the same kernels:
given as its cache the one row that an id would name, a kernel reads it, and has to fault.

A fault ends a process's use of the GPU, so each is provoked in a process of its own.
"""

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sparse_mla_verify.evidence.recordings import FOLDER, Host
from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    LATENT,
    NAN_BYTE,
    SEED,
    UNIT_SCALE,
    Case,
    e4m3_bytes,
)
from sparse_mla_verify.inputs.schedules import REFERENCE, kernel_schedule
from sparse_mla_verify.measure.bits import compare_bits
from sparse_mla_verify.measure.predict import Bits, predict
from sparse_mla_verify.processes.workers import one_thread_each, processes

SCHEMA = 1
FILE = "guarded_h200.json"
TIMEOUT_S = 120

ROWS = 32768  # of 576 bytes: 9 x 2 MiB, a multiple of what can be mapped
MAPPED = ROWS * COLUMNS
#: Ids outside the cache, and so outside the mapped range.
OUTSIDE = (-1, ROWS, ROWS + 1, 2**31 - 1, -(2**31))
#: Reserved on either side: all that an int32 can name, else what the nearest ids do.
EVERY_ID, NEAREST = 2**31 * COLUMNS, 64 * 2**20

# What a read of unmapped memory is: errors of CUDA's driver.
FAULTS = ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")


# The cases


@dataclass(frozen=True)
class Shape:
    """A case's heads, the width of its lists and each row's count."""

    heads: int
    width: int
    counts: tuple[int, ...]


#: Clusters of 16 and of 32 heads; rows of one chunk and of several, whatever the schedule. The
#: kernels are those of cases that the recordings hold.
SHAPES = MappingProxyType(
    {
        "guarded/16-heads": Shape(16, 2048, (100, 1100, 640)),
        "guarded/checkpoint": Shape(96, 256, (256, 255, 240, 192, 128)),
        "guarded/32-heads": Shape(
            96, 1100, (1099, 1025, 577, 513, 512, 511, 129, 128, 65, 64, 33, 8)
        ),
    }
)

#: Where ids outside the cache stand in a list of n; row r of a case has the place r mod 7.
PLACES = MappingProxyType(
    {
        "every seventh": lambda n: np.arange(n) % 7 == 0,
        "first": lambda n: np.arange(n) == 0,
        "last": lambda n: np.arange(n) == n - 1,
        "second half": lambda n: np.arange(n) >= n // 2,
        "second quarter": lambda n: (np.arange(n) >= n // 4) & (np.arange(n) < n // 2),
        "all but one": lambda n: np.arange(n) != n // 3,
        "all": lambda n: np.arange(n) >= 0,
    }
)

#: How a case is run: with the cache that is mapped, and as if it had two rows more.
OUTSIDE_CACHE, UNNAMED = "ids outside the cache", "rows that no list names"
GIVEN = OUTSIDE_CACHE, UNNAMED
MORE_ROWS = 2


@functools.lru_cache(2 * len(SHAPES))
def guarded_case(name: str, schedule: str) -> Case:
    """A case of `SHAPES` whose every id outside the cache is one of `OUTSIDE`.

    Past the counts stand ids outside the cache, N and -1. The first and the last row of the cache
    are keys, every row that is none is NaN.
    """
    shape = SHAPES[name]
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    batch = len(shape.counts)
    query = e4m3_bytes(rng.standard_normal((batch, shape.heads, COLUMNS)))
    ids = 1 + rng.permutation(ROWS - 2)[: sum(shape.counts)]
    rows = np.resize(np.array([ROWS, -1], np.int32), (batch, shape.width))
    places = list(PLACES.values())
    for r, (n, start) in enumerate(zip(shape.counts, np.cumsum((0, *shape.counts)), strict=False)):
        outside = places[r % len(places)](n)
        given = np.resize(np.roll(np.array(OUTSIDE, np.int64), -r), n)
        rows[r, :n] = np.where(outside, given, ids[start : start + n])
    rows[0, 1:3] = 0, ROWS - 1
    named = np.unique(rows[(rows >= 0) & (rows < ROWS)])
    kv = np.full((ROWS, COLUMNS), NAN_BYTE, np.uint8)
    kv[named] = e4m3_bytes(rng.standard_normal((len(named), COLUMNS)))
    return Case(
        family="guarded",
        name=name,
        about=f"{batch} rows of {shape.heads} heads; {ROWS} cache rows between unmapped addresses",
        query=query,
        kv=kv,
        rows=rows,
        valid=np.array(shape.counts, np.int32),
        scale_log2=UNIT_SCALE,
        out_scale=1.0,
        heads=shape.heads,
        schedule=schedule,
    )


def unnamed(case: Case) -> Case:
    """A case as it is given to a kernel that takes the cache to be two rows longer than it is.

    Those rows are unmapped, and named past the counts alone: a kernel that reads what doesn't count
    faults, though the id be inside. The reference gives the same bits.
    """
    rows = case.rows.copy()
    counts = np.arange(rows.shape[1]) < case.counts[:, None]
    more = (rows >= ROWS) & (rows < ROWS + MORE_ROWS)
    rows[counts & more] = 2**31 - 1
    past = np.resize(ROWS + np.arange(MORE_ROWS, dtype=np.int32), rows.shape)
    return replace(case, rows=np.where(counts, rows, past).astype(np.int32))


# What a run gave


@dataclass(frozen=True)
class Layout:
    """Bytes of the cache, and of the unmapped reservation before and after it, at the least."""

    rows: int
    mapped: int
    before: int
    after: int


@dataclass(frozen=True)
class GuardedRun:
    """A case on a schedule: how its bits compare with the reference's.

    `digests` are of each row's latents and LSEs, as the kernel gave them. `error` is what ended the
    run: "" for nothing. Then there are no bits.
    """

    schedule: str
    case: str
    given: str
    signature: str
    inputs: str
    elements: int = 0
    differing: int = 0
    digests: tuple[str, ...] = ()
    first: str = ""
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether it ran to its end and no bit differs."""
        return not self.error and self.elements > 0 and self.differing == 0


@dataclass(frozen=True)
class GivenRow:
    """A kernel whose cache is the one row that an id would name: what came of it.

    `mapped` is whether there is memory, `access` what the driver says of it; `error` is CUDA's when
    all work was to be finished, "" for none.
    """

    schedule: str
    id: int
    mapped: bool
    access: str
    error: str

    @property
    def faulted(self) -> bool:
        """Whether the read faulted."""
        return self.error in FAULTS


@dataclass(frozen=True)
class GuardedRecording:
    """All of a run; `machine_code` by signature."""

    host: Host
    layout: Layout
    machine_code: Mapping[str, str]
    runs: tuple[GuardedRun, ...]
    given_rows: tuple[GivenRow, ...]
    schema: int = SCHEMA

    def of(self, schedule: str) -> "GuardedRecording":
        """What is of one schedule."""
        runs = tuple(run for run in self.runs if run.schedule == schedule)
        keys = {run.signature for run in runs}
        return replace(
            self,
            machine_code={key: sha for key, sha in self.machine_code.items() if key in keys},
            runs=runs,
            given_rows=tuple(row for row in self.given_rows if row.schedule == schedule),
        )

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(path: Path) -> GuardedRecording:
    """Read a recording. Raises ValueError if it is none, or of another schema."""
    plain = json.loads(path.read_text())
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA or "given_rows" not in plain:
        raise ValueError(f"path: {path} is no recording of guarded caches of schema {SCHEMA}")
    return GuardedRecording(
        Host(**plain["host"]),
        Layout(**plain["layout"]),
        plain["machine_code"],
        tuple(GuardedRun(**{**r, "digests": tuple(r["digests"])}) for r in plain["runs"]),
        tuple(GivenRow(**r) for r in plain["given_rows"]),
    )


def shipped() -> Path:
    """The recording that comes with the package."""
    return FOLDER / FILE


def row_digests(bits: Bits) -> tuple[str, ...]:
    """Of each row of latent `[batch, heads, 512]` and lse `[batch, heads]`: 128 bits of SHA-256."""
    found = []
    for latent, lse in zip(*bits, strict=True):
        parts = np.ascontiguousarray(latent, "<u2"), np.ascontiguousarray(lse, "<u4")
        found.append(hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest()[:32])
    return tuple(found)


# In a process of its own, on the GPU


def trial(schedule: str, given: int | None, folder: Path) -> None:
    """One process's work; it leaves `trial.json` in a folder, and the outputs' bits.

    With an id: the kernel is given the row that it would name. Without: rows that are there, which
    must not fault, and then the cases.
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
    """The cache's memory: amid all that an id can name, or where that can't be reserved, less."""
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
    count = workers or os.cpu_count() or 1
    pairs = list(product(REFERENCE, SHAPES))
    with one_thread_each(), processes(count) as pool, ThreadPoolExecutor(count) as threads:
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
    command = [sys.executable, "-m", "sparse_mla_verify.gpu_runs.guarded", "--schedule", schedule]
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
        raise RuntimeError(f"{schedule}, id {given}: {said}")
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
    parser = argparse.ArgumentParser(prog="sparse_mla_verify.gpu_runs.guarded", description=__doc__)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--workers", type=int, help="processes (all cores unless said)")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", choices=tuple(REFERENCE), help=argparse.SUPPRESS)
    parser.add_argument("--given", type=int, choices=OUTSIDE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.into:
        trial(options.schedule, options.given, options.into)
        sys.stdout.flush()
        os._exit(0)  # a context that faulted is left as it is
    began = time.perf_counter()
    try:
        from sparse_mla_verify.gpu_runs.gpu import device_name, host
    except ImportError as missing:
        print(missing, file=sys.stderr)
        return 2
    if device_name() is None:
        print("no GPU", file=sys.stderr)
        return 2
    recording = run_all(f"{host().arch}a", options.workers)
    if options.out:
        recording.save(options.out)
    for line in said(recording):
        print(line)
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if holds(recording) else 1


def holds(recording: GuardedRecording) -> bool:
    """Whether all ran without an error, no bit differs, and exactly the unmapped rows faulted."""
    rows = recording.given_rows
    as_mapped = all(not row.error if row.mapped else row.faulted for row in rows)
    return bool(recording.runs) and all(run.same for run in recording.runs) and as_mapped


def stale(recording: GuardedRecording) -> list[str]:
    """What is not of today's cases: the mapped range, inputs, sizes, machine code."""
    layout, found = recording.layout, []
    if (layout.rows, layout.mapped) != (ROWS, MAPPED):
        found.append(f"a cache of {layout.rows} rows, {layout.mapped} bytes mapped")
    if min(layout.before, layout.after) < NEAREST:
        found.append(f"{layout.before} and {layout.after} bytes unmapped, not {NEAREST} or more")
    for run in recording.runs:
        if run.case not in SHAPES:
            found.append(f"{run.case}: no case of today's")
            continue
        case = told(run)
        size = case.batch * case.heads * (LATENT + 1)
        of_today = run.signature, run.inputs
        if (
            of_today != (case.signature.key, case.digest())
            or run.signature not in recording.machine_code
        ):
            found.append(f"{run.case}, {run.given}: other inputs, or other machine code")
        elif not run.error and (run.elements, len(run.digests)) != (size, case.batch):
            found.append(f"{run.case}, {run.given}: {run.elements} elements, not {size}")
    return found


def unpredicted(recording: GuardedRecording) -> list[str]:
    """The runs whose recorded bits of the row with the fewest keys are not the reference's."""
    found = []
    for run in recording.runs:
        case = told(run)
        least = int(np.argmin(case.counts))
        expected = row_digests(predict(case.row(least)))[0]
        if not run.error and run.digests[least] != expected:
            found.append(f"{run.case}, {run.given}, row {least}: other bits than the reference's")
    return found


def told(run: GuardedRun) -> Case:
    """The case as the kernel was given it."""
    case = guarded_case(run.case, run.schedule)
    return case if run.given == OUTSIDE_CACHE else unnamed(case)


def said(recording: GuardedRecording) -> list[str]:
    """A recording in lines."""
    layout = recording.layout
    sides = f"{layout.before:,} before and {layout.after:,} after"
    lines = [f"{layout.mapped:,} bytes mapped, reserved and unmapped: {sides}"]
    for run in recording.runs:
        found = run.error or f"{run.differing:,} of {run.elements:,} elements differ {run.first}"
        lines.append(f"{run.schedule}, {run.case}, {run.given}: {found}")
    for row in recording.given_rows:
        kind = "mapped" if row.mapped else "unmapped"
        found = row.error or "no error"
        lines.append(f"{row.schedule}, given row {row.id} ({kind}, {row.access}): {found}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
