"""The command line: `sparse-mla-audit`, and the same as `python -m sparse_mla_verify`.

A sub-command's module is imported when the command is named, so that help comes at once and a
command loads no more than it needs: `sanitize` runs under compute-sanitizer, `guarded` and
`variants` start processes of their own, and a computer without PyTorch can run the others.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ABOUT = """usage: sparse-mla-audit [COMMAND] [OPTION ...]

Check a sparse MLA kernel bit for bit and claim by claim. `COMMAND --help` shows a command's
options. Without a command, `run` is taken.
"""


@dataclass(frozen=True)
class Command:
    """A sub-command: the module and the function that run it, and what it does."""

    module: str
    function: str
    about: str


COMMANDS = {
    "run": Command("audit.command", "run", "decide every claim, on the GPU or on a recording"),
    "list": Command("audit.listing", "list_all", "list the claims and the case families"),
    "explain": Command("audit.listing", "explain", "say what a claim means and what refutes it"),
    "record": Command("audit.command", "record", "run every case on the GPU and write a recording"),
    "figures": Command("audit.figures", "main", "write what a recording found, for a page"),
    "attribute": Command("attribution.command", "main", "show which rounding makes which error"),
    "identify": Command("black_box.command", "main", "find out another kernel's conventions"),
    "identified": Command("planted.identified_page", "main", "write the tables of `identify`"),
    "bench": Command("bench.command", "main", "time the kernel on the GPU, or show such a run"),
    "hardware": Command("hardware.command", "main", "compare the instructions' models with a GPU"),
    "push check": Command("push.check", "main", "check push mode, with emulated ranks on one GPU"),
    "push group": Command("push.group", "main", "check push mode, with a process for each GPU"),
    "guarded": Command("gpu_runs.guarded", "main", "look for reads outside the cache, which fault"),
    "sanitize": Command("gpu_runs.sanitize", "main", "run briefly, for compute-sanitizer"),
    "stages": Command("stage_trace.command", "main", "find the stage of a differing bit"),
    "variants": Command("planted.variants", "main", "run kernels with planted faults on the GPU"),
}


def usage() -> str:
    """The commands, a line each."""
    return f"{ABOUT}\n{_listed(list(COMMANDS))}"


def _listed(names: Sequence[str]) -> str:
    width = max(map(len, names))
    lines = (f"  {name:{width}}  {COMMANDS[name].about}" for name in names)
    return "commands:\n" + "\n".join(lines) + "\n"


def _beginning_with(word: str) -> list[str]:
    """The commands of two words of which this is the first."""
    return [name for name in COMMANDS if name.startswith(f"{word} ")]


def split(given: Sequence[str]) -> tuple[str, list[str]]:
    """The command that is named, and what follows it.

    Raises ValueError for a word that names none.
    """
    if not given or given[0].startswith("-"):
        return "run", list(given)
    for words in (1, 2):
        if (name := " ".join(given[:words])) in COMMANDS:
            return name, list(given[words:])
    together = _beginning_with(given[0])
    said = " ".join(given[:2]) if together else given[0]
    raise ValueError(f"command must be one of {', '.join(together or COMMANDS)}, got {said!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if given[1:2] in (["-h"], ["--help"]) and (together := _beginning_with(given[0])):
        print(
            f"usage: sparse-mla-audit {given[0]} COMMAND [OPTION ...]\n\n{_listed(together)}",
            end="",
        )
        return 0
    try:
        name, rest = split(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    command = COMMANDS[name]
    module = importlib.import_module(f"sparse_mla_verify.{command.module}")
    status: int = getattr(module, command.function)(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
