"""What is kept of a comparison, and what it must hold to be complete."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.hardware import arithmetic, families
from sparse_mla_verify.hardware.instructions import INSTRUCTIONS
from sparse_mla_verify.hardware.sweeps import SWEEPS

SCHEMA = 1
ALL_ENCODINGS = "all encodings"
GROUPS = ("mufu", "convert", "arithmetic", "mma")
LEAST_INPUTS = 10**8  # of an operation that can't be compared on all inputs
GPU, SYNTHETIC = "gpu", "synthetic"  # where the results came from


@dataclass(frozen=True)
class Example:
    """A mismatch, in hexadecimal: the inputs' encodings, the GPU's and the model's result."""

    inputs: str
    got: str
    want: str


@dataclass(frozen=True)
class Part:
    """A family of an operation's inputs, or all encodings.

    Attributes:
        name: of the family.
        inputs: how many results were compared.
        mismatches: how many of them differ; a lower bound if `located` is False.
        results_digest: of the GPU's results: of a sweep the hash of every head, 16 hexadecimal
            digits each; of a family half the SHA-256 of the first chunk.
        inputs_digest: of a family, half the SHA-256 of the first chunk's inputs.
        located: whether every mismatch was counted.
        examples: some of the mismatches.
        error: why the comparison is not complete, or "".
    """

    name: str
    inputs: int = 0
    mismatches: int = 0
    results_digest: str = ""
    inputs_digest: str = ""
    located: bool = True
    examples: tuple[Example, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Compared:
    """An operation: its model against the GPU.

    `tables` is the SHA-256 of the model's constants (`tables_hash`), `machine_code` that of
    the machine code, `seconds` the wall time until it was compared.
    """

    name: str
    group: str
    instruction: str
    tables: str
    machine_code: str
    seconds: float
    parts: tuple[Part, ...]

    @property
    def inputs(self) -> int:
        """Results that were compared."""
        return sum(part.inputs for part in self.parts)

    @property
    def mismatches(self) -> int:
        """Results that differ."""
        return sum(part.mismatches for part in self.parts)

    @property
    def errors(self) -> tuple[str, ...]:
        """What kept parts from being complete."""
        return tuple(f"{part.name}: {part.error}" for part in self.parts if part.error)

    @property
    def first(self) -> str:
        """The first mismatch in words, or ""."""
        for part in self.parts:
            for e in part.examples:
                return f"{part.name}: {e.inputs} gave {e.got}, expected {e.want}"
        return ""


@dataclass(frozen=True)
class Record:
    """One run."""

    source: str
    command: str
    host: Host
    cores: int
    seconds: float
    compared: tuple[Compared, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON, with the sums that a reader looks for."""
        plain = {"schema": SCHEMA, **asdict(self)}
        plain["compared"] = [
            {
                "name": c.name,
                "inputs": c.inputs,
                "mismatches": c.mismatches,
                "first": c.first,
                **{k: v for k, v in asdict(c).items() if k != "name"},
            }
            for c in self.compared
        ]
        json_files.write(path, plain)


def load(path: Path) -> Record:
    """Read a record. Raises ValueError for a file that is none of this schema."""
    return json_files.read(path, "a hardware comparison", _from_plain, SCHEMA)


def _from_plain(plain: dict[str, Any]) -> Record:
    compared = tuple(_compared(c) for c in plain["compared"])
    kept = {key: plain[key] for key in ("source", "command", "cores", "seconds")}
    return Record(host=Host(**plain["host"]), compared=compared, **kept)


def _compared(plain: dict[str, Any]) -> Compared:
    parts = tuple(
        Part(**{**part, "examples": tuple(Example(**e) for e in part["examples"])})
        for part in plain["parts"]
    )
    keys = ("name", "group", "instruction", "tables", "machine_code", "seconds")
    return Compared(**{key: plain[key] for key in keys}, parts=parts)


def names_of(groups: Iterable[str]) -> tuple[str, ...]:
    """The operations of the groups, in the order in which they run."""
    chosen = set(groups)
    names = [name for name, sweep in SWEEPS.items() if sweep.group in chosen]
    if "arithmetic" in chosen:
        names += arithmetic.OPERATIONS
    if "mma" in chosen:
        names += INSTRUCTIONS
    return tuple(names)


def families_of(name: str) -> tuple[str, ...]:
    """The names of the parts that an operation has."""
    if name in SWEEPS:
        return (ALL_ENCODINGS,)
    return tuple(
        arithmetic.OPERAND_FAMILIES if name in arithmetic.OPERATIONS else families.MATRIX_FAMILIES
    )


def group_of(name: str) -> str:
    """The group that an operation belongs to."""
    if name in SWEEPS:
        return SWEEPS[name].group
    return "arithmetic" if name in arithmetic.OPERATIONS else "mma"


def instruction_of(name: str) -> str:
    """What the GPU runs."""
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name].ptx
    if name in SWEEPS:
        return SWEEPS[name].instruction
    return arithmetic.OPERATIONS[name].instruction


def tables_hash(name: str) -> str:
    """SHA-256 of the constants that decide the model's results; "" where IEEE 754 does alone.

    Of a tensor-core model: what it sums at once and to how many bits, not what is said about it.
    """
    if name in arithmetic.OPERATIONS:
        return ""
    tables = SWEEPS[name].tables if name in SWEEPS else INSTRUCTIONS[name].model
    plain = asdict(tables) if is_dataclass(tables) and not isinstance(tables, type) else tables
    if name in INSTRUCTIONS:
        about = ("name", "instruction", "sass", "evidence")
        plain = {key: value for key, value in plain.items() if key not in about}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def shortcomings(record: Record, groups: Iterable[str] = GROUPS) -> list[str]:
    """What keeps a record from being a complete comparison without a mismatch; empty if nothing."""
    found = {c.name: c for c in record.compared}
    wrong = []
    for name in names_of(groups):
        if name not in found:
            wrong.append(f"{name}: not compared")
            continue
        compared = found[name]
        least = 1 << 32 if name in SWEEPS else LEAST_INPUTS
        if compared.mismatches:
            wrong.append(f"{name}: {compared.mismatches:,} mismatches; {compared.first}")
        if compared.inputs < least:
            wrong.append(f"{name}: {compared.inputs:,} results compared, not {least:,}")
        if tuple(part.name for part in compared.parts) != families_of(name):
            wrong.append(f"{name}: families {[part.name for part in compared.parts]}")
        wrong += [f"{name}: {error}" for error in compared.errors]
        wrong += [
            f"{name}: {part.name}: nothing compared" for part in compared.parts if not part.inputs
        ]
    return wrong
