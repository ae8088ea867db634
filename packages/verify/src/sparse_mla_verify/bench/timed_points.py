"""Measuring points: prepare every implementation, check what it computes, time all in turn."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparse_mla_verify.bench.grid import TRIALS
from sparse_mla_verify.bench.results import (
    FLASHMLA,
    FLOOR,
    PYTORCH,
    Pick,
    Result,
    Spread,
)
from sparse_mla_verify.bench.timing import (
    POINT_SECONDS,
    Replay,
    Timer,
    interleave,
)
from sparse_mla_verify.peers.implementation import Implementation, Prepared
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import decode
from sparse_mla_verify.peers.workload import Pool, Workload, workload

# Of the relative error. BF16 probabilities and results err by a few 2^-9, E4M3 probabilities by up
# to 2^-4 each: these bounds say that all decode the same thing. Bits are the audit's.
BOUNDS = {FLASHMLA: 0.02}
BOUND = 0.06


@dataclass
class Bench:
    """What all points share.

    Args:
        pool: The KV cache.
        implementations: What is timed.
        timer: What makes replays.
        width: Row ids that a list of ours holds.
        sm_mhz: Reads the clock of the GPU's SMs, None if it can't be read.
        sets: Input sets, launches of a graph.
        pick: The implementation that is ours at `(rows, heads)`; None if none is to be called so.
        trials: Trials at a point.
        seconds: After which no further trial of a point starts.
    """

    pool: Pool
    implementations: Sequence[Implementation]
    timer: Timer
    width: int
    sm_mhz: Callable[[], int | None]
    sets: int
    pick: Pick | None = None
    trials: int = TRIALS
    seconds: float = POINT_SECONDS
    clock: Callable[[], float] = field(default=time.perf_counter)

    def point(self, point: Point) -> Result:
        """Time every implementation at a point."""
        work = workload(self.pool, point, self.width, self.sets)
        prepare = {i.name: functools.partial(i.prepare, work) for i in self.implementations}
        return self._measured(work, prepare)

    def wide(self, point: Point) -> Result:
        """Time our schedules and FlashMLA with lists as wide as the keys, and as wide as ever."""
        work = workload(self.pool, point, self.width, self.sets)
        lists = {
            "narrow": work.widened(point.keys, point.keys),
            "wide": work.widened(self.width, self.width),
        }
        prepare = {
            f"{i.name}_{which}": functools.partial(i.prepare, each)
            for i in self.implementations
            if i.name not in (PYTORCH, FLOOR)
            for which, each in lists.items()
        }
        return self._measured(work, prepare)

    def _measured(self, work: Workload, prepare: Mapping[str, Callable[[], Prepared]]) -> Result:
        expected = _expected(work)
        replays: dict[str, Replay] = {}
        kept: list[Prepared] = []  # a graph holds none of the tensors that it reads and writes
        errors: dict[str, float] = {}
        failed: dict[str, str] = {}
        notes: dict[str, Any] = {}
        for name, get_ready in prepare.items():
            try:
                prepared = get_ready()
                kept.append(prepared)
                replay = self.timer.capture(prepared.calls)
                if prepared.latent is not None:
                    errors[name] = relative_error(prepared.latent, replay, expected)
            # One implementation that can't run at a point must not lose the others' results.
            except Exception as error:
                failed[name] = (str(error) or type(error).__name__).splitlines()[0]
                continue
            replays[name] = replay
            notes |= {key: note for key, note in prepared.notes.items() if key not in notes}
        samples = interleave(replays, trials=self.trials, seconds=self.seconds, clock=self.clock)
        kept.clear()  # not before the last replay
        mhz = self.sm_mhz()
        spreads = {name: Spread.of(taken) for name, taken in samples.items()}
        result = Result(
            point=work.point,
            width=work.width,
            times_us={name: spread.median for name, spread in spreads.items()},
            spread_us={name: (spread.low, spread.high) for name, spread in spreads.items()},
            trials=min(map(len, samples.values()), default=0),
            relative_error=errors,
            sm_mhz=mhz,
            notes=notes,
            failed=failed,
        )
        return result.with_ours(self.pick) if self.pick else result


def relative_error(
    latent: torch.Tensor, replay: Replay, expected: Callable[[int], torch.Tensor]
) -> float:
    """How far a replay's first and last results are from what is expected of them; the larger.

    The outputs are poisoned before. Raises RuntimeError if any of them, of any launch, has not been
    written with a finite number.
    """
    latent.fill_(torch.nan)
    replay()
    if not bool(latent.isfinite().all()):
        raise RuntimeError("outputs must be written and finite, got others")
    return max(_distance(latent[k], expected(k)) for k in {0, len(latent) - 1})


def _distance(latent: torch.Tensor, expected: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(latent.double() - expected)
    size = torch.linalg.vector_norm(expected)
    # Without keys the result is 0, and so must be the difference.
    return float(difference / size) if bool(size > 0) else float(difference)


def _expected(work: Workload) -> Callable[[int], torch.Tensor]:
    @functools.cache
    def latent(k: int) -> torch.Tensor:
        inputs = (work.query[k], work.pool.kv, work.ids[k], work.valid)
        return decode(*inputs, scale_log2=work.scale_log2, out_scale=work.out_scale)[0]

    return latent


def disagreeing(results: Iterable[Result]) -> list[str]:
    """Where an implementation computes something else, or failed: one line each."""
    lines = []
    for result in results:
        for name, error in result.relative_error.items():
            bound = BOUNDS.get(name.split("_")[0], BOUND)
            if not error <= bound:
                lines.append(f"{result.point}: {name} is off by {error:.3g}, bound {bound}")
        lines += [f"{result.point}: {name} failed: {why}" for name, why in result.failed.items()]
    return lines
