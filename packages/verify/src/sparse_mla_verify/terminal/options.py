"""The options of commands: parsers, and types of values with argparse's error for a wrong one."""

import argparse
import re
from pathlib import Path

from sparse_mla_verify.inputs.cases import FAMILIES
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE

COMMAND = "sparse-mla-audit"


def spelled_today(recorded: str) -> str:
    """A recorded command as it is typed today.

    Older recordings name a module, as in `python -m sparse_mla_verify.bench stages`. The module's
    name is today the name of a sub-command. A command of another form is returned as it stands.
    """
    return re.sub(r"^python -m sparse_mla_verify\.(?=\w+(?:\s|$))", f"{COMMAND} ", recorded)


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a sub-command, or with "" of the command; `about` is shown as it stands."""
    return argparse.ArgumentParser(
        prog=f"{COMMAND} {name}".rstrip(),
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}") from None
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def one_or_more(text: str) -> int:
    """1 or more."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def families(text: str) -> list[str]:
    """Names of case families, with commas between them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(FAMILIES)}, got {unknown}")
    return names


def add_choice_of_cases(command: argparse.ArgumentParser) -> None:
    """Add `--schedule` and `--families`."""
    command.add_argument("--schedule", choices=tuple(REFERENCE), default=BASE)
    command.add_argument("--families", type=families, default=[], help="comma-separated names")


def add_workers(command: argparse.ArgumentParser) -> None:
    """Add `--workers`."""
    command.add_argument("--workers", type=one_or_more, help="processes (all cores unless said)")


def add_into(command: argparse.ArgumentParser) -> None:
    """Add `--into`, a page."""
    command.add_argument("--into", type=Path, help="write it between the marks of this page")
