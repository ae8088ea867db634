"""What a run found, as it stands in the JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparse_mla_verify.bench.grid import HOST_POINT
from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.peers.point import Point

OURS, FLASHMLA, PYTORCH, FLOOR = "ours", "flashmla", "pytorch", "floor"
SCHEDULES = tuple(REFERENCE)  # our schedules that ship, each timed under its name
# Always in the JSON, null where not measured.
NAMES = (OURS, *SCHEDULES, FLASHMLA, PYTORCH, FLOOR)
SUFFIX = "_us"
HOST = "run_sparse"  # host times: of ours; of a schedule with its name after a blank

Pick = Callable[[int, int], str]  # the schedule's name for so many rows and heads
Value = TypeVar("Value")


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of several samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of at least one sample."""
        low, high = np.percentile(samples, [10, 90])
        return cls(statistics.median(samples), float(low), float(high))


@dataclass(frozen=True)
class Result:
    """A point: microseconds a launch (median) and their 10th and 90th percentile, by name.

    relative_error is the norm of the difference from the float64 result over the result's norm;
    notes say what else was particular, failed why an implementation has no time. The times of
    `ours` are those of the schedule that `notes["ours"]` names, not of runs of its own.
    """

    point: Point
    width: int
    times_us: Mapping[str, float]
    spread_us: Mapping[str, tuple[float, float]]
    trials: int
    relative_error: Mapping[str, float] = field(default_factory=dict)
    sm_mhz: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, of: str, to: str) -> float | None:
        """One time over another, None where one is missing."""
        if of in self.times_us and to in self.times_us:
            return self.times_us[of] / self.times_us[to]
        return None

    def with_ours(self, pick: Pick) -> Result:
        """The same with the times of the schedule that is picked for the batch as ours."""
        name = pick(self.point.rows, self.point.heads)
        return replace(
            self,
            times_us=_with_ours(self.times_us, name),
            spread_us=_with_ours(self.spread_us, name),
            notes={OURS: name} | {key: n for key, n in self.notes.items() if key != OURS},
        )

    def plain(self, always: Iterable[str] = NAMES) -> dict[str, Any]:
        """The result as JSON has it."""
        point, names = self.point, dict.fromkeys((*always, *self.times_us))
        return {
            "rows": point.rows,
            "heads": point.heads,
            "keys": point.keys,
            **{name + SUFFIX: _rounded(self.times_us.get(name)) for name in names},
            "spread_us": {n: [_rounded(t) for t in pair] for n, pair in self.spread_us.items()},
            "trials": self.trials,
            "width": self.width,
            "relative_error": {n: float(f"{e:.3g}") for n, e in self.relative_error.items()},
            "sm_mhz": self.sm_mhz,
            "notes": dict(self.notes),
            "failed": dict(self.failed),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Result:
        """Read what `plain` gave."""
        times = {k.removesuffix(SUFFIX): t for k, t in plain.items() if k.endswith(SUFFIX)}
        del times["spread"]
        spread = {name: (low, high) for name, (low, high) in plain["spread_us"].items()}
        return cls(
            Point(plain["rows"], plain["heads"], plain["keys"]),
            plain["width"],
            {name: time for name, time in times.items() if time is not None},
            spread,
            plain["trials"],
            plain["relative_error"],
            plain["sm_mhz"],
            plain["notes"],
            plain["failed"],
        )


@dataclass(frozen=True)
class Run:
    """A whole run. `about` holds the GPU, the method and the code: the JSON's other entries."""

    about: Mapping[str, Any]
    results: Sequence[Result]
    wide: Sequence[Result] = ()
    host_us: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[Point] = ()

    def at(self, point: Point) -> Result | None:
        """The result at a point, if it was measured."""
        return next((result for result in self.results if result.point == point), None)

    def with_ours(self, pick: Pick) -> Run:
        """The same with another choice of what is ours: no time is measured again."""
        host = {name: spread for name, spread in self.host_us.items() if name != HOST}
        chosen = f"{HOST} {pick(HOST_POINT.rows, HOST_POINT.heads)}"
        return replace(
            self,
            results=[result.with_ours(pick) for result in self.results],
            wide=[result.with_ours(pick) for result in self.wide],
            host_us=({HOST: host[chosen]} if chosen in host else {}) | host,
        )

    @property
    def names(self) -> list[str]:
        """The implementations that have a time somewhere."""
        return list(dict.fromkeys(name for result in self.results for name in result.times_us))

    def save(self, path: Path) -> None:
        """Write the JSON; its folder is made if need be."""
        plain = {
            **self.about,
            "host_us": dict(self.host_us),
            "left_out": [[p.rows, p.heads, p.keys] for p in self.left_out],
            "wide": [result.plain(always=()) for result in self.wide],
            "results": [result.plain() for result in sorted(self.results, key=_point)],
        }
        json_files.write_lines(path, plain)


def load(path: Path) -> Run:
    """Read a run's JSON. Raises ValueError for a file that is none."""
    return json_files.read(path, "a benchmark's run", _from_plain)


def _from_plain(plain: dict[str, Any]) -> Run:
    parts = ("host_us", "left_out", "wide", "results")
    run = Run(
        {key: value for key, value in plain.items() if key not in parts},
        [Result.from_plain(result) for result in plain["results"]],
        [Result.from_plain(result) for result in plain["wide"]],
        plain["host_us"],
        [Point(*sizes) for sizes in plain["left_out"]],
    )
    times = [t for result in (*run.results, *run.wide) for t in result.times_us.values()]
    if wrong := [time for time in times if not (math.isfinite(time) and time > 0)]:
        raise ValueError(f"times must be finite and above 0, got {wrong[0]}")
    return run


def _with_ours(of: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Entries `NAME` and `NAME_...` also as `ours` and `ours_...`, before the others."""
    others = {key: value for key, value in of.items() if key.split("_")[0] != OURS}
    ours = {
        OURS + key.removeprefix(name): value
        for key, value in others.items()
        if key == name or key.startswith(f"{name}_")
    }
    return ours | others


def _point(result: Result) -> Point:
    return result.point


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)
