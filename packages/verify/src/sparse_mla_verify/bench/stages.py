"""Where a launch's time goes, stage by stage, by clock stamps in a copy of the kernel.

The copy (`stamps`) is compiled, in a process of its own that imports it instead of the package, for
a few batch shapes. A CUDA graph of as many launches as the benchmark's runs on inputs of their own
and a cold L2; the middle launches' outputs hold the stamps.

That process is `python -m sparse_mla_verify.bench.stages FOLDER OUT COMMAND`. It is no sub-command:
it is started by `sparse-mla-audit bench stages` alone, with the copy in front of the package.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_mla_verify.bench import stamps
from sparse_mla_verify.bench.grid import CHECKPOINT, WIDTH
from sparse_mla_verify.bench.results import FLOOR, Run, Spread
from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.inputs.schedules import (
    BASE,
    LOW_LATENCY,
    LOW_LATENCY_2,
    LOW_LATENCY_4,
    kernel_schedule,
)
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.processes.patched_kernel import PACKAGE, environment
from sparse_mla_verify.terminal.options import spelled_today

if TYPE_CHECKING:
    from sparse_mla_kernel import Schedule

#: The run that ships.
#: Of a stage: 2 ms. A launch takes microseconds, and a BF16 pair above 2^-133 is a larger word.
MOST_CLOCKS = 2**22
SHIPPED = "stages_h200.json"
#: What is measured.
POINTS = (
    *(
        (name, Point(CHECKPOINT.rows, CHECKPOINT.heads, keys))
        for name in (BASE, LOW_LATENCY, LOW_LATENCY_4)
        for keys in (0, 16, 256, 2048)
    ),
    (LOW_LATENCY_2, Point(8, 128, 2048)),
)
TRIALS = 9  # of a graph, for the time of a launch
NOTE = (
    "the cubins are those of stamped copies: the kernels that ship, with a clock read at each "
    "stage's end and the sums written over the outputs"
)
TIMEOUT_S = 300
_MIDDLE = 16  # launches in the middle of a graph whose stamps count
#: Warps that do every stage: of the base schedule those that ask for the keys, of the others those
#: that end the sums.
_WARPS = {"e4m3": (0, 1), "f16": (4, 5, 6, 7)}

#: What the stages are, on the page.
SAID = {
    "start": "barriers' initialisation (before the wait)",
    "pdl": "wait for the launch before",
    "count": "count load",
    "ids": "row ids load",
    "gather": "gather issued",
    "query": "query arrives, fragments",
    "keys": "keys arrive",
    "qk": "QK",
    "barriers": "barriers in the CTA",
    "softmax": "softmax",
    "pv": "PV",
    "pv_softmax": "PV beside the next chunk's softmax",
    "push": "push to the peers issued",
    "values": "V arrives",
    "peers": "peers' data arrives",
    "merge": "merge",
    "store": "store issued",
}


# ---- stamps to figures --------------------------------------------------------------------------


@dataclass(frozen=True)
class Staged:
    """A schedule's stages at a point, over CTAs, in clocks of the SM.

    A CTA's figure is the mean over the warps that do every stage. `whole` is from the end of the
    wait for the launch before to the last store's issue; `slowest` the median over launches of the
    last CTA's whole; `launch_us` the time of a launch of the stamped copy. `sm_mhz` is how fast the
    SMs' clocks ran, from :func:`clock_mhz`.
    """

    schedule: str
    point: Point
    stages: Mapping[str, Spread]
    whole: Spread
    slowest: float
    launch_us: float
    sm_mhz: float | None

    def us(self, clocks: float) -> float | None:
        """Clocks in microseconds; None where the clock is not known."""
        return None if self.sm_mhz is None else clocks / self.sm_mhz

    def plain(self) -> dict[str, Any]:
        """The result as JSON has it."""
        return {
            "schedule": self.schedule,
            "rows": self.point.rows,
            "heads": self.point.heads,
            "keys": self.point.keys,
            "sm_mhz": self.sm_mhz,
            "launch_us": round(self.launch_us, 3),
            "slowest": self.slowest,
            "whole": _triple(self.whole),
            "stages": {name: _triple(spread) for name, spread in self.stages.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Staged:
        """Read what `plain` gave."""
        return cls(
            plain["schedule"],
            Point(plain["rows"], plain["heads"], plain["keys"]),
            {name: Spread(*triple) for name, triple in plain["stages"].items()},
            Spread(*plain["whole"]),
            plain["slowest"],
            plain["launch_us"],
            plain["sm_mhz"],
        )


def _triple(spread: Spread) -> list[float]:
    return [spread.median, spread.low, spread.high]


def _over_ctas(clocks: np.ndarray) -> Spread:
    """Clocks to a tenth, as the JSON has them."""
    return Spread(*(round(x, 1) for x in _triple(Spread.of(clocks.tolist()))))


def stamped_words(latent: np.ndarray, split: int, heads: int, warps: Sequence[int]) -> np.ndarray:
    """What warps wrote into outputs: int32 `[launches, CTAs, warps, words]`.

    Args:
        latent: Outputs `[launches, B, H, 512]`, 16-bit words.
        split: CTAs of a cluster; each owns `512 / split` columns.
        heads: Heads of a CTA. Warp w's sums are in the w-th of them.
        warps: Which warps.
    """
    launches, rows, all_heads, columns = latent.shape
    own = latent.reshape(launches, rows, all_heads // heads, heads, split, columns // split)
    own = np.moveaxis(own[:, :, :, list(warps)], 4, 3)  # [launch, row, tile, CTA, warp, column]
    words = np.ascontiguousarray(own).view(np.int32)[..., : stamps.WORDS]
    return words.reshape(launches, -1, len(warps), stamps.WORDS)


def laps(words: np.ndarray) -> np.ndarray:
    """The stages' clocks in :func:`stamped_words`: `[launches, CTAs, warps, stages]`, int64.

    Raises:
        ValueError: A sum is negative or longer than any launch of these takes, or a warp has no
            clocks at all: the words are a kernel's outputs, not stamps.
    """
    found = words[..., : len(stamps.TIMED_STAGES)].astype(np.int64)
    wrong = found[(found < 0) | (found > MOST_CLOCKS)]
    if wrong.size:
        raise ValueError(f"words must be stamps of 0 to {MOST_CLOCKS} clocks, got {wrong[0]}")
    if not found.any(axis=-1).all():
        raise ValueError("words must be stamps, got a warp whose stages took 0 clocks")
    return found


def clock_mhz(words: np.ndarray, launch_us: float) -> float | None:
    """How fast the SMs' clocks ran: those from launch to launch over a launch's time.

    Of each SM's first and last CTA in the launches that were read, the clocks between their last
    readings; the median over SMs. None if no SM had CTAs of two launches.

    Args:
        words: From :func:`stamped_words`.
        launch_us: The time of a launch of that graph's replay.
    """
    last = words[:, :, 0, stamps.CLOCK].astype(np.uint32)
    sms = words[:, :, 0, stamps.SM]
    launches = np.broadcast_to(np.arange(len(words))[:, None], sms.shape)
    rates = []
    for sm in np.unique(sms):
        when, clock = launches[sms == sm], last[sms == sm]
        first, final = int(when.argmin()), int(when.argmax())
        if when[final] > when[first]:
            clocks = (int(clock[final]) - int(clock[first])) % 2**32  # it has 32 bits
            rates.append(clocks / (when[final] - when[first]))
    return round(float(np.median(rates)) / launch_us, 1) if rates else None


def summed_up(
    found: np.ndarray, schedule: str, point: Point, launch_us: float, sm_mhz: float | None
) -> Staged:
    """Figures of stamps `[launches, CTAs, warps, stages]`; stages that no CTA has are left out."""
    ctas = found.mean(axis=2).reshape(-1, found.shape[-1])
    wholes = found[..., stamps.FIRST :].sum(axis=-1)
    stages = {
        name: _over_ctas(ctas[:, k])
        for k, name in enumerate(stamps.TIMED_STAGES)
        if ctas[:, k].any()
    }
    return Staged(
        schedule,
        point,
        stages,
        _over_ctas(ctas[:, stamps.FIRST :].sum(axis=-1)),
        float(np.median(wholes.max(axis=(1, 2)))),
        launch_us,
        sm_mhz,
    )


# ---- a run on the GPU ---------------------------------------------------------------------------


def run(out: Path, said: str) -> int:
    """Measure in a process that imports the stamped copy; its exit status.

    0; 2 without a GPU; else an error's, which the process has printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = environment(stamps.stamped(folder))
        # Several processes compile, one runs: through a cache that goes with the folder.
        variables.pop("SPARSE_MLA_CACHE", None)
        variables["SPARSE_MLA_CACHE_DIR"] = str(folder / "cache")
        command = [sys.executable, "-m", __name__, str(folder), str(out.absolute()), said]
        return subprocess.run(command, env=variables, check=False, timeout=TIMEOUT_S).returncode


def measure(folder: Path, out: Path, said: str) -> int:
    """What that process does: compile, run, write the JSON."""
    import torch

    if not torch.cuda.is_available():
        print("the stages need an NVIDIA GPU and PyTorch with CUDA", file=sys.stderr)
        return 2
    import sparse_mla_kernel
    from sparse_mla_kernel.checks import architecture_of
    from sparse_mla_verify.bench.timing import GraphTimer
    from sparse_mla_verify.gpu_runs import gpu
    from sparse_mla_verify.peers.ours import Sparse
    from sparse_mla_verify.peers.workload import SETS, Pool
    from sparse_mla_verify.processes.workers import spread

    if not Path(sparse_mla_kernel.__file__).is_relative_to(folder):
        raise RuntimeError(f"{PACKAGE} must be the stamped copy, got {sparse_mla_kernel.__file__}")
    device = torch.device("cuda", torch.cuda.current_device())
    arch = architecture_of(device)
    tasks = [(name, *sizes, arch) for name, sizes in signatures().items()]
    list(spread(_precompile, tasks, len(tasks)))
    kernels = {name: Sparse(name, kernel_schedule(name)) for name in signatures()}
    timer, pool = GraphTimer(device), Pool(device)
    results = []
    for name, point in POINTS:
        staged = _measure_point(kernels[name], point, timer, pool)
        results.append(staged)
        print(f"{name} {point}: {staged.launch_us:.2f} us, whole {staged.whole}", flush=True)
    host = asdict(gpu.host())
    plain = {
        **{name: host[name] for name in ("gpu", "driver", "date")},
        "command": said,
        "note": NOTE,
        "launches": SETS,
        "launches_read": _MIDDLE,
        "width": WIDTH,
        "machine_code": {name: dict(kernel.machine_code) for name, kernel in kernels.items()},
        "versions": host,
    }
    save(out, plain, results)
    print(f"written: {out}", flush=True)
    return 0


def signatures() -> dict[str, tuple[int, int]]:
    """Rows and heads of each schedule's kernel; it has one."""
    return {name: (point.rows, point.heads) for name, point in POINTS}


def _precompile(name: str, rows: int, heads: int, arch: str) -> None:
    from sparse_mla_kernel import precompile_sparse

    schedule = kernel_schedule(name)
    if not precompile_sparse(rows, heads, heads, WIDTH, rows, arch, schedule=schedule):
        raise RuntimeError(f"the cache must keep {name}, got no entry")


def _measure_point(kernel: Any, point: Point, timer: Any, pool: Any) -> Staged:
    """A point of a schedule, by `peers.ours.Sparse`, a `timing.Timer` and a `workload.Pool`."""
    import torch

    from sparse_mla_verify.peers.workload import workload

    prepared = kernel.prepare(workload(pool, point, WIDTH))
    replay = timer.capture(prepared.calls)
    replay()
    times = [replay() for _ in range(TRIALS)]
    middle = len(prepared.calls) // 2
    outputs = prepared.latent[middle - _MIDDLE // 2 : middle + _MIDDLE // 2]
    words = outputs.view(torch.int16).cpu().numpy()
    schedule = kernel.schedule
    heads = cta_heads(schedule, point)
    found = stamped_words(words, schedule.split, heads, _WARPS[schedule.mma])
    mhz = clock_mhz(found, times[-1])
    return summed_up(laps(found), kernel.name, point, statistics.median(times), mhz)


def cta_heads(schedule: Schedule, point: Point) -> int:
    """Heads of a CTA."""
    from sparse_mla_kernel.kernels.low_latency.decode import tiles_of
    from sparse_mla_kernel.schedule import TILE_HEADS

    if schedule.mma == "f16":
        return TILE_HEADS * tiles_of(point.rows, point.heads, schedule.split)
    return TILE_HEADS


# ---- the JSON -----------------------------------------------------------------------------------


def save(path: Path, about: Mapping[str, Any], results: Sequence[Staged]) -> None:
    """Write the JSON, a result a line; its folder is made if need be."""
    json_files.write_lines(path, {**about, "results": [staged.plain() for staged in results]})


def load(path: Path) -> tuple[dict[str, Any], list[Staged]]:
    """Read a run's JSON. Raises ValueError for a file that is none."""
    return json_files.read(path, "the JSON of stages", _from_plain)


def _from_plain(plain: dict[str, Any]) -> tuple[dict[str, Any], list[Staged]]:
    return plain, [Staged.from_plain(result) for result in plain.pop("results")]


def shipped() -> Path:
    """Where the run that ships lies, or would."""
    return Path(str(resources.files("sparse_mla_verify").joinpath("data", SHIPPED)))


# ---- the page -----------------------------------------------------------------------------------


def markdown(file: Path, bench: Run) -> str:
    """The tables of a run and of the benchmark's."""
    about, results = load(file)
    parts = [
        f"{about['gpu']}, driver {about['driver']}, {about['date']}: "
        f"`{spelled_today(about['command'])}`. Figures are medians over the CTAs of "
        f"{about['launches_read']} launches, in microseconds (in brackets: in clocks of the SM)."
    ]
    for point in dict.fromkeys(staged.point for staged in results):
        parts.append(_stages([staged for staged in results if staged.point == point]))
    parts += ["Times from launch to launch, in microseconds:", _launches(results, bench)]
    least = _least([staged for staged in results if staged.point == CHECKPOINT], bench)
    if least:
        parts += [f"The least time that any schedule takes for each step at {CHECKPOINT}:", least]
    return "\n\n".join(parts) + "\n"


def _stages(results: Sequence[Staged]) -> str:
    """All schedules at a point."""
    head = [f"{results[0].point}", *(f"`{staged.schedule}`" for staged in results)]
    lines = [
        [SAID[name], *(_cell(staged, staged.stages.get(name)) for staged in results)]
        for name in stamps.TIMED_STAGES
        if any(name in staged.stages for staged in results)
    ]
    lines.append(["from the wait's end", *(_cell(staged, staged.whole) for staged in results)])
    return _table(head, lines)


def _cell(staged: Staged, spread: Spread | None) -> str:
    if spread is None:
        return ""
    time_us = staged.us(spread.median)
    clocks = f"{spread.median:.0f}"
    return clocks if time_us is None else f"{time_us:.2f} ({clocks})"


def _launches(results: Sequence[Staged], bench: Run) -> str:
    """What a launch takes, and what of it lies before the wait's end or after the last store."""
    lines = []
    for staged in results:
        at = bench.at(staged.point)
        times = at.times_us if at else {}
        slowest = staged.us(staged.slowest)
        rest = None if slowest is None else staged.launch_us - slowest
        lines.append(
            [
                f"{staged.point} `{staged.schedule}`",
                *map(
                    _us,
                    (
                        times.get(staged.schedule),
                        staged.launch_us,
                        staged.us(staged.whole.median),
                        slowest,
                        rest,
                        times.get(FLOOR),
                    ),
                ),
            ]
        )
    head = ["", "as it ships", "stamped", "median CTA", "slowest CTA", "rest", "empty kernel"]
    return _table(head, lines)


def _least(results: Sequence[Staged], bench: Run) -> str:
    """For each step the schedule that takes least of those that have it, and the sum."""
    floor = at.times_us.get(FLOOR) if (at := bench.at(CHECKPOINT)) else None
    lines = []
    total = floor or 0.0
    for name in stamps.TIMED_STAGES[stamps.FIRST :]:
        having = [staged for staged in results if name in staged.stages]
        if not having or any(staged.sm_mhz is None for staged in having):
            continue
        least = min(having, key=lambda staged: staged.stages[name].median)
        time_us = least.us(least.stages[name].median)
        assert time_us is not None
        total += time_us
        lines.append([SAID[name], _us(time_us), f"`{least.schedule}`"])
    if not lines or floor is None:
        return ""
    empty = ["launch, cluster start, exit: the empty kernel", _us(floor), f"`{FLOOR}`"]
    return _table(["step", "us", "where"], [empty, *lines, ["sum", _us(total), ""]])


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.2f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


if __name__ == "__main__":
    sys.exit(measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
