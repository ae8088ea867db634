"""Files of JSON: one way to write a record, one way to read it, one error for what is none."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


def write(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a record, each of its values on a line of its own."""
    path.write_text(json.dumps(plain, indent=1) + "\n")


def write_lines(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a record with a line for each entry, and for each element of an entry's list.

    The folder is made if it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [f"{json.dumps(key)}: {_entry(value)}" for key, value in plain.items()]
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def _entry(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def read(
    path: Path, what: str, build: Callable[[dict[str, Any]], Record], schema: int | None = None
) -> Record:
    """Read a file and build the record that it holds.

    `what` names the kind of record, for the error. With a `schema`, the file must name that schema.

    Raises:
        ValueError: The file is not there, is no JSON, is of another schema, or `build` raises one
            of the errors that a file of another kind leads to.
    """
    try:
        plain = json.loads(path.read_text())
        if not isinstance(plain, dict):
            raise ValueError(f"the file must hold an object, got a {type(plain).__name__}")
        if schema is not None and plain.get("schema") != schema:
            raise ValueError(f"schema must be {schema}, got {plain.get('schema')}")
        return build(plain)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"path must be {what}, got {path}: {why}") from error
