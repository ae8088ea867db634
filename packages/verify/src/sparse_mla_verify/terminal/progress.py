"""Progress of long work: what a worker tells, and its bars on the terminal."""

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Told of the work's parts: how much there is of each, and when a piece of it is done."""

    def start(self, part: str, total: int) -> None:
        """A part begins."""

    def advance(self, part: str, amount: int = 1) -> None:
        """Some of a part is done."""


class Bars:
    """A `Progress` that shows a bar for each part."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, part: str, total: int) -> None:
        """A part begins: a bar of its own."""
        self._tasks[part] = self._bars.add_task(part, total=total)

    def advance(self, part: str, amount: int = 1) -> None:
        """Its bar grows."""
        self._bars.advance(self._tasks[part], amount)


def bars_on(console: Console) -> RichProgress:
    """Bars for a console, with counts and times."""
    text, done = TextColumn("{task.description:>16}"), MofNCompleteColumn()
    return RichProgress(text, BarColumn(), done, TimeElapsedColumn(), console=console)
