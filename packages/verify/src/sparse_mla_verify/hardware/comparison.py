"""The comparison: models on all cores, operations on the device, encodings side by side."""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.hardware import arithmetic, instructions
from sparse_mla_verify.hardware.hashing import HEAD, HEADS
from sparse_mla_verify.hardware.record import (
    ALL_ENCODINGS,
    Compared,
    Example,
    Part,
    families_of,
    group_of,
    instruction_of,
    tables_hash,
)
from sparse_mla_verify.hardware.sweeps import SWEEPS, expected_hash
from sparse_mla_verify.processes.workers import processes
from sparse_mla_verify.terminal.progress import Progress

# Mismatches that are kept of a part, and heads of a sweep whose mismatches are counted one by one.
EXAMPLES = 16
LOCATED_HEADS = 4

OUT_OF_TIME = "out of time"


class Device(Protocol):
    """Runs the operations. Results are encodings."""

    def host(self) -> Host:
        """The GPU, the driver and the versions."""

    def prepare(self, name: str) -> str:
        """Make an operation ready to run; the SHA-256 of its machine code."""

    def hashes(self, name: str) -> NDArray[np.uint64]:
        """A sweep's hash of every head [512]."""

    def table(self, name: str, head: int) -> NDArray[np.uint32]:
        """A sweep's words [2^23] for one head."""

    def run(self, name: str, inputs: tuple[NDArray[Any], ...]) -> NDArray[np.uint32]:
        """An operation's or instruction's results for one chunk, in the shape of the third input.

        Inputs: as `arithmetic.operands` or `instructions.problems` gives them.
        """


@dataclass
class Session:
    """A run.

    Attributes:
        device: runs the operations.
        names: the operations to compare, as `record.names_of` orders them.
        progress: is told.
        workers: processes for the models.
        budget: seconds after which nothing more is waited for.
        heads: of a sweep, those to compare.
        chunks: of a family, how many; all by default.
    """

    device: Device
    names: Sequence[str]
    progress: Progress
    workers: int
    budget: float
    heads: Sequence[int] = range(HEADS)
    chunks: int | None = None
    _start: float = field(default_factory=time.monotonic)
    _machine_code: dict[str, str] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def compare(self) -> Iterator[Compared]:
        """Compare operation after operation; one that fails says so and the rest goes on.

        The models of all sweeps are set going first, and the device works beside them.
        """
        sweeps = [name for name in self.names if name in SWEEPS]
        with _Pool(self.workers) as pool:
            models = {
                name: [pool.submit(expected_hash, name, head) for head in self.heads]
                for name in sweeps
            }
            hashes = self._prepare()
            for name in self.names:
                if name in models:
                    self._watch(name, models[name])
            for name in self.names:
                if name in self._failed:
                    parts = tuple(Part(f, error=self._failed[name]) for f in families_of(name))
                    _cancel(models.get(name, []))
                elif name in models:
                    parts = (self._sweep(name, hashes[name], models[name]),)
                else:
                    parts = self._families(name, pool)
                yield self._compared(name, parts)

    def _compared(self, name: str, parts: tuple[Part, ...]) -> Compared:
        try:
            tables = tables_hash(name)
        except Exception as error:  # a model that the reference lacks
            tables = f"none: {error!r}"
        return Compared(
            name=name,
            group=group_of(name),
            instruction=instruction_of(name),
            tables=tables,
            machine_code=self._machine_code.get(name, ""),
            seconds=round(self.seconds, 1),
            parts=parts,
        )

    def _prepare(self) -> dict[str, NDArray[np.uint64]]:
        """Compile everything and hash every sweep on the device."""
        hashes = {}
        self.progress.start("device", len(self.names))
        for name in self.names:
            try:
                self._machine_code[name] = self.device.prepare(name)
                if name in SWEEPS:
                    hashes[name] = self.device.hashes(name)
            except Exception as error:
                self._failed[name] = repr(error)
            self.progress.advance("device")
        return hashes

    def _watch(self, name: str, models: list[Future[int]]) -> None:
        self.progress.start(name, len(models))
        for model in models:
            model.add_done_callback(lambda _: self.progress.advance(name))

    # ---- all encodings --------------------------------------------------------------------------

    def _sweep(self, name: str, got: NDArray[np.uint64], models: list[Future[int]]) -> Part:
        part = Part(ALL_ENCODINGS, results_digest="".join(f"{int(h):016x}" for h in got))
        differing = []
        try:
            for head, model in zip(self.heads, models, strict=True):
                want = model.result(timeout=max(0.0, self.budget - self.seconds))
                part = replace(part, inputs=part.inputs + HEAD)
                if want != int(got[head]):
                    differing.append(head)
        except TimeoutError:
            part = replace(part, error=OUT_OF_TIME)
        except Exception as error:
            part = replace(part, error=repr(error))
        _cancel(models)
        return self._locate(name, part, differing) if differing else part

    def _locate(self, name: str, part: Part, differing: list[int]) -> Part:
        """Count the mismatches of the first differing heads; each other one has at least one."""
        part = replace(part, mismatches=len(differing), located=False)
        try:
            count, examples = 0, []
            for head in differing[:LOCATED_HEADS]:
                want, got = SWEEPS[name].expected(head), self.device.table(name, head)
                where = np.flatnonzero(got != want)
                # A hash that differs though the words agree is a fault of its own.
                count += max(1, where.size)
                for i in where[: EXAMPLES // LOCATED_HEADS]:
                    word = f"{(head << 23) + int(i):08x}"
                    examples.append(Example(word, f"{got[i]:08x}", f"{want[i]:08x}"))
        except Exception as error:
            return replace(part, error=f"locating mismatches: {error!r}")
        rest = len(differing[LOCATED_HEADS:])
        return replace(part, mismatches=count + rest, located=rest == 0, examples=tuple(examples))

    # ---- families of inputs ---------------------------------------------------------------------

    def _families(self, name: str, pool: "_Pool") -> tuple[Part, ...]:
        """Inputs and results come from the pool, chunk after chunk; the device runs each."""
        kind = arithmetic if name in arithmetic.OPERATIONS else instructions
        parts = {family: Part(family) for family in families_of(name)}
        chunks = range(kind.CHUNKS if self.chunks is None else self.chunks)
        items = [(name, family, chunk) for family in parts for chunk in chunks]
        self.progress.start(name, len(items))
        for (_, family, chunk), model in pool.stream(kind.expected, items):
            part = parts[family]
            if not part.error:
                try:
                    left = max(0.0, self.budget - self.seconds)
                    inputs, want = model.result(timeout=left)
                    got = self.device.run(name, inputs)
                    parts[family] = _counted(part, inputs, got, want, first=chunk == 0)
                except TimeoutError:
                    parts[family] = replace(part, error=OUT_OF_TIME)
                except Exception as error:
                    parts[family] = replace(part, error=repr(error))
            self.progress.advance(name)
        return tuple(parts.values())


def digest(*arrays: NDArray[Any]) -> str:
    """Half the SHA-256 of arrays' encodings, on a little-endian machine."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def _counted(
    part: Part,
    inputs: tuple[NDArray[Any], ...],
    got: NDArray[np.uint32],
    want: NDArray[np.uint32],
    *,
    first: bool,
) -> Part:
    """The part with a chunk more."""
    if got.shape != want.shape:
        raise ValueError(f"the device's results must be of shape {want.shape}, got {got.shape}")
    where = np.argwhere(got != want)
    room = EXAMPLES - len(part.examples)
    examples = tuple(
        Example(_inputs_at(inputs, tuple(i)), f"{got[tuple(i)]:08x}", f"{want[tuple(i)]:08x}")
        for i in where[:room]
    )
    return replace(
        part,
        inputs=part.inputs + got.size,
        mismatches=part.mismatches + len(where),
        results_digest=digest(got) if first else part.results_digest,
        inputs_digest=digest(*inputs) if first else part.inputs_digest,
        examples=part.examples + examples,
    )


def _inputs_at(inputs: tuple[NDArray[Any], ...], index: tuple[int, ...]) -> str:
    """The encodings that a result depends on: a, b, c; of a product, A's row and B's column."""
    a, b, c = inputs
    if len(index) == 1:
        return " ".join(f"{x[index].view(np.uint32):08x}" for x in inputs)
    t, m, n = index
    return (
        f"a={a[t, m].tobytes().hex()} b={b[t, n].tobytes().hex()} c={c[index].view(np.uint32):08x}"
    )


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()


class _Pool:
    """Processes for the models, one BLAS thread each; a fresh set where one of them died."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ[f"{library}_NUM_THREADS"] = "1"
        return processes(self._workers)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            return self._pool.submit(function, *arguments)
        except BrokenProcessPool:
            self._pool = self._new()
            return self._pool.submit(function, *arguments)

    def stream(
        self, function: Callable[..., Any], items: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[tuple[Any, ...], Future[Any]]]:
        """Each item with its future, in order, a few of them under way at a time."""
        waiting: deque[tuple[tuple[Any, ...], Future[Any]]] = deque()
        for item in items:
            waiting.append((item, self.submit(function, *item)))
            if len(waiting) > 3 * self._workers:
                yield waiting.popleft()
        yield from waiting
